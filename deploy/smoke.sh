#!/bin/sh
# smoke.sh BASE_URL: does the running server do what it is there for? One line for each step; ends with 1 at the first
# one that fails and says what was wanted. Needs curl.
#
#   NWOR_ADMIN_API_KEY   the server's admin key; required: the mode is switched, and put back
#   NWOR_ADMIN_URL       where the admin API listens, if not on BASE_URL (--admin-port)
#   VLLM_API_KEY         a user's key, where the server wants one
#   SMOKE_WAIT           seconds to wait for /health; default 0
#   SMOKE_TIMEOUT        seconds that one answer may take; default 120
set -u

[ $# -eq 1 ] || { echo "usage: NWOR_ADMIN_API_KEY=KEY smoke.sh BASE_URL" >&2; exit 2; }
base=${1%/}
admin_base=${NWOR_ADMIN_URL:-$base}
admin_base=${admin_base%/}
admin_key=${NWOR_ADMIN_API_KEY:-}
user_key=${VLLM_API_KEY:-}
[ -n "$admin_key" ] || { echo "smoke.sh: set NWOR_ADMIN_API_KEY to the server's admin key" >&2; exit 2; }

tokens=24
step=0
body=$(mktemp) && errors=$(mktemp) || exit 2
restore=
cleanup() {
    if [ -n "$restore" ]; then
        call "$admin_key" PUT /admin/nwor "{\"mode\": \"$restore\"}"
        [ "$status" = 200 ] || echo "smoke.sh: the mode could not be put back to '$restore'" >&2
    fi
    rm -f "$body" "$errors"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

say() {
    step=$((step + 1))
    printf '%2d. %s ... ' "$step" "$1"
}
good() { echo "ok${1:+: $1}"; }
# bad WANTED GOT: also shows the beginning of the last answer.
bad() {
    echo "FAILED"
    printf '    wanted: %s\n    got:    %s\n' "$1" "$2"
    printf '    answer: %s\n' "$(cat "$errors" "$body" | head -c 600 | tr -d '\r' | tr '\n' ' ')"
    exit 1
}

# call KEY METHOD PATH [JSON]: the answer lands in $body, its status in $status (000: none). The key goes to curl on
# standard input, so that it stands in no list of processes.
call() {
    : > "$body"
    header=
    [ -z "$1" ] || header="header = \"Authorization: Bearer $(printf '%s' "$1" | sed 's/[\\"]/\\&/g')\""
    if [ $# -gt 3 ]; then
        set -- "$1" "$2" "$3" -H 'Content-Type: application/json' --data "$4"
    fi
    method=$2 url=$base$3
    case $3 in /admin/*) url=$admin_base$3 ;; esac
    shift 3
    status=$(printf '%s\n' "$header" | curl -sS -K - -o "$body" -w '%{http_code}' --max-time "${SMOKE_TIMEOUT:-120}" \
        -X "$method" "$@" "$url" 2> "$errors") || status="${status:-000}, curl ended with $?"
}
want_status() { [ "$status" = "$1" ] || bad "status $1" "status $status"; }
# The first number that stands behind "NAME": in $body.
number() { sed -n "s/.*\"$1\": *\([0-9][0-9]*\).*/\1/p" "$body" | head -n 1; }
string() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p" "$body" | head -n 1; }
# metric NAME [LABEL]: the sum of one metric's samples in $body; nothing where there are none.
metric() {
    awk -v name="$1" -v label="${2:-}" '
        { at = index($1, "{"); found = at ? substr($1, 1, at - 1) : $1 }
        found == name && (label == "" || index($0, label)) { sum += $NF; seen = 1 }
        END { if (seen) printf "%.0f\n", sum }' "$body"
}
mode_in_force() { awk '/^nwor_mode\{/ && $NF == 1 { if (match($0, /mode="[a-z]+"/)) print substr($0, RSTART + 6, RLENGTH - 7) }' "$body" | sort -u; }
prompt() { printf '{"model": "%s", "prompt": "def add(a, b):", "max_tokens": %d, "ignore_eos": true, "temperature": 0%s}' "$model" "$tokens" "$1"; }

say "GET /health"
waited=0
call "" GET /health
while [ "$status" != 200 ] && [ "$waited" -lt "${SMOKE_WAIT:-0}" ]; do
    sleep 1
    waited=$((waited + 1))
    call "" GET /health
done
want_status 200
good

say "GET /v1/models"
call "$user_key" GET /v1/models
want_status 200
model=$(sed 's/.*"data": *\[ *{//; s/"permission".*//' "$body" | sed -n 's/.*"id": *"\([^"]*\)".*/\1/p')
[ -n "$model" ] || bad "a model's id" "none"
good "$model"

if [ -n "$user_key" ]; then
    say "a request without the API key is refused"
    call "" POST /v1/completions "$(prompt '')"
    want_status 401
    good 401
fi

say "GET /metrics"
call "" GET /metrics
want_status 200
generated=$(metric vllm:generation_tokens_total)
drafted=$(metric vllm:spec_decode_num_draft_tokens_total)
[ -n "$generated" ] || bad "the metric vllm:generation_tokens_total" "none"
good "vllm:generation_tokens_total is $generated"

say "a prompt is completed"
call "$user_key" POST /v1/completions "$(prompt '')"
want_status 200
[ "$(string object)" = text_completion ] || bad "an object 'text_completion'" "'$(string object)'"
[ "$(string finish_reason)" = length ] || bad "finish_reason 'length'" "'$(string finish_reason)'"
[ "$(number completion_tokens)" = "$tokens" ] || bad "$tokens completion tokens" "$(number completion_tokens)"
good "$tokens tokens"

say "a completion is streamed"
call "$user_key" POST /v1/completions "$(prompt ', "stream": true, "stream_options": {"include_usage": true}')"
want_status 200
last=$(grep '^data: ' "$body" | tail -n 1 | tr -d '\r')
[ "$last" = "data: [DONE]" ] || bad "'data: [DONE]' at the end" "'$last'"
chunks=$(grep -c '^data: .*"text"' "$body")
[ "$chunks" -gt 1 ] || bad "more than one chunk" "$chunks"
[ "$(number completion_tokens)" = "$tokens" ] || bad "$tokens completion tokens" "$(number completion_tokens)"
good "$chunks chunks"

say "an unknown model is answered with 404"
served=$model
model=no-such-model
call "$user_key" POST /v1/completions "$(prompt '')"
model=$served
want_status 404
good

say "/metrics has counted both completions"
call "" GET /metrics
want_status 200
now=$(metric vllm:generation_tokens_total)
[ $((now - generated)) -ge $((2 * tokens)) ] || bad "vllm:generation_tokens_total to rise by $((2 * tokens)) at least" "$generated -> $now"
if [ -n "$drafted" ]; then
    [ "$(metric vllm:spec_decode_num_draft_tokens_total)" -gt "$drafted" ] || bad "draft tokens to be counted" "$drafted, as before"
fi
mismatches=$(metric nwor_accounting_mismatches_total)
[ "${mismatches:-0}" = 0 ] || bad "no accounting mismatches" "$mismatches"
mode=$(mode_in_force)
[ -n "$mode" ] || bad "one of nwor_mode{mode=...} to be 1: NWOR in the engine" "none"
good "mode $mode"

if [ "$admin_base" != "$base" ]; then
    say "the public port has no admin API"
    elsewhere=$admin_base
    admin_base=$base
    call "$admin_key" GET /admin/nwor
    admin_base=$elsewhere
    want_status 404
    good 404
fi

say "the admin API without a key is refused"
call "" GET /admin/nwor
[ "$status" != 403 ] || bad "status 401" "403: this server has no admin key"
want_status 401
call "" PUT /admin/nwor '{"mode": "off"}'
want_status 401
good 401

say "the admin API with a wrong key is refused"
call "not-$admin_key" PUT /admin/nwor '{"mode": "off"}'
want_status 401
if [ -n "$user_key" ]; then
    call "$user_key" PUT /admin/nwor '{"mode": "off"}'
    want_status 401
fi
call "" GET /metrics
[ "$(mode_in_force)" = "$mode" ] || bad "the mode to be '$mode' as before" "'$(mode_in_force)'"
good 401

say "the admin API with the key shows the mode"
call "$admin_key" GET /admin/nwor
want_status 200
[ "$(string mode)" != "" ] || bad "a mode" "none"
grep -q '"ranks_agree": *true' "$body" || bad '"ranks_agree": true' "not so"
modes=$(sed -n 's/.*"modes": *\[\([^]]*\)\].*/\1/p' "$body" | tr -d '"' | tr -s ', ' '  ')
[ -n "$modes" ] || bad "the modes that may be switched to" "none"
good "$mode of $modes"

restore=$mode
for next in $modes $mode; do
    say "PUT /admin/nwor switches to '$next', and a prompt is completed"
    call "$admin_key" PUT /admin/nwor "{\"mode\": \"$next\"}"
    want_status 200
    [ "$(string new)" = "$next" ] || bad "\"new\": \"$next\"" "'$(string new)'"
    call "$user_key" POST /v1/completions "$(prompt '')"
    want_status 200
    [ "$(number completion_tokens)" = "$tokens" ] || bad "$tokens completion tokens" "$(number completion_tokens)"
    call "" GET /metrics
    [ "$(mode_in_force)" = "$next" ] || bad "nwor_mode{mode=\"$next\"} to be 1" "'$(mode_in_force)' is"
    good
done
restore=

echo "all $step steps passed"
