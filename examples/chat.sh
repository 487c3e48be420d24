#!/bin/sh
# A chat of two turns with curl only. The second turn finds the KV cache of the first: see x-homing-affinity and
# cached_tokens.
#
#   examples/chat.sh [URL] [MODEL]
set -eu
url=${1:-http://127.0.0.1:8000}
model=${2:-smollm2-135m-instruct}
session="curl-$$"
rules="You are the clerk of a harbour. Ships are let in by size, smallest first; cargo is weighed twice; \
every captain signs the book before a rope is tied, and nobody pays before the tide turns."

ask() { # the messages of the whole conversation so far, as JSON
    curl --silent --show-error --fail-with-body --dump-header - "$url/v1/chat/completions" \
        --header 'content-type: application/json' \
        --header "x-session-id: $session" \
        --data "{\"model\": \"$model\", \"max_tokens\": 16, \"messages\": [$1]}" |
        tr -d '\r' | grep -E '^(HTTP/|x-homing-(backend|affinity|reason)|\{)'
}

first='{"role": "system", "content": "'$rules'"}, {"role": "user", "content": "May I come in?"}'
echo "Turn 1"
ask "$first"
echo "Turn 2"
ask "$first, {\"role\": \"assistant\", \"content\": \"Sign the book first.\"}, {\"role\": \"user\", \"content\": \"Done.\"}"
