"""What pipeline stages agree on, and windows whose counts come some steps later."""
