"""Health check of the images: ends with 0 where /health answers 200. The images carry no curl."""

import http.client
import sys

PORT = 8000
TIMEOUT = 4.0


def main(port: int) -> int:
    """Return 0 when the server on this machine is healthy, 1 otherwise, and print why."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer: {error}")
        return 1
    finally:
        connection.close()
    print(f"/health answers {status}")
    return 0 if status == http.client.OK else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else PORT))
