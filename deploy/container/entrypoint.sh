#!/bin/sh
# Entry point of the images: takes keys out of files, then becomes nwor-server.
#
# NWOR_ADMIN_API_KEY and VLLM_API_KEY may be given as they are, or as a file named by NWOR_ADMIN_API_KEY_FILE and
# VLLM_API_KEY_FILE; without either, the file that compose mounts below /run/secrets is read where there is one. A key
# only ever reaches the environment of the server's own process: not the command line, not the container's settings.
set -eu

fail() {
    printf 'nwor-entrypoint: error: %s\n' "$1" >&2
    exit 2
}

# load_key VARIABLE DEFAULT_FILE: an empty file means that no key is set.
load_key() {
    given=$(printenv "$1" || true)
    file=$(printenv "$1_FILE" || true)
    if [ -n "$file" ]; then
        [ -z "$given" ] || fail "$1 and $1_FILE are both set: drop one of them"
        [ -r "$file" ] || fail "$1_FILE names $file, which user $(id -u) cannot read"
    elif [ -z "$given" ] && [ -e "$2" ]; then
        [ -r "$2" ] || fail "user $(id -u) cannot read $2: make the file readable for it (chmod 444)"
        file=$2
    else
        return 0
    fi
    key=$(cat "$file")
    [ -n "$key" ] || return 0
    case $key in
        *[[:space:]]*) fail "the key in $file has blanks or several lines: write one word" ;;
    esac
    export "$1=$key"
}

load_key NWOR_ADMIN_API_KEY /run/secrets/nwor_admin_api_key
load_key VLLM_API_KEY /run/secrets/vllm_api_key

# Without a command line of its own the container takes NWOR_ARGS, words parted by blanks, and without that the demo.
if [ $# -eq 0 ]; then
    set -f
    # shellcheck disable=SC2086
    set -- ${NWOR_ARGS:---demo}
    set +f
fi

case ${1:-} in
    mode | --version | --help | --help=*) exec nwor-server "$@" ;;
esac

# Reachable from outside the container, at the port that the image exposes, unless the caller says otherwise.
host=--host port=--port
for word in "$@"; do
    case $word in
        --host | --host=* | --uds | --uds=*) host= ;;
        --port | --port=*) port= ;;
    esac
done
[ -z "$host" ] || set -- "$@" --host 0.0.0.0
[ -z "$port" ] || set -- "$@" --port 8000
exec nwor-server "$@"
