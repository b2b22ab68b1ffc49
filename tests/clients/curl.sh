#!/bin/sh
# What a user does in a terminal: curl against ./server on a Unix socket.
set -eu
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
"${QUIRE_SERVER:-./server}" -m models/quire-14m-q8_0.gguf --unix "$folder/sock" --no-log 2>"$folder/err" &
server=$!
trap 'kill $server 2>/dev/null; wait $server; rm -rf "$folder"' EXIT
until grep -q listening "$folder/err"; do
    kill -0 $server || { cat "$folder/err" >&2; exit 1; }
    sleep 0.05
done

ask() { path=$1; shift; curl -sS --unix-socket "$folder/sock" "$@" "http://localhost$path"; }
json() { path=$1; body=$2; shift 2; ask "$path" -H 'Content-Type: application/json' -d "$body" "$@"; }
n=0
is() { # WHAT EXPECTED ACTUAL: the second has to occur in the third
    n=$((n + 1))
    case $3 in *"$2"*) ;; *) echo "curl.sh: $1: no '$2' in: $3" >&2; exit 1 ;; esac
}

is health '200' "$(ask /health -o /dev/null -w '%{http_code}')"
is models '"object":"list"' "$(ask /v1/models)"
is completion '"finish_reason":"length"' "$(json /v1/completions '{"prompt":"Once","max_tokens":4,"ignore_eos":true}')"
is chat '"role":"assistant"' "$(json /v1/chat/completions '{"messages":[{"role":"user","content":"Hello"}],"max_tokens":8}')"
is stream 'data: [DONE]' "$(json /v1/completions '{"prompt":"Once","max_tokens":4,"stream":true}')"
is tokenize '"count":' "$(json /tokenize '{"prompt":"Hello"}')"
is 'the tokenizer' '"eos_token":"<' "$(ask /tokenizer_info)"
is embedding '"embedding":' "$(json /v1/embeddings '{"input":"Hello"}')"
is metrics 'vllm:num_requests_running' "$(ask /metrics)"
is 'a wrong field' '"param":"temperature"' "$(json /v1/completions '{"prompt":"a","temperature":-1}')"
is 'no JSON' '400' "$(json /v1/completions '{"prompt":' -o /dev/null -w '%{http_code}')"
is 'no such path' '404' "$(ask /nothing -o /dev/null -w '%{http_code}')"
is 'no such method' '405' "$(ask /v1/completions -X DELETE -o /dev/null -w '%{http_code}')"
is 'a form' '400' "$(ask /v1/completions -d 'prompt=a' -o /dev/null -w '%{http_code}')"
is head '200' "$(ask /v1/models --head)"
head -c 100000 /dev/zero | tr '\0' ' ' >"$folder/blanks"
{ cat "$folder/blanks"; printf '{"prompt":"Once","max_tokens":1}'; } >"$folder/large"
is 'a body in chunks, after 100 Continue' '"text_completion"' \
    "$(ask /v1/completions -H 'Content-Type: application/json' -H 'Transfer-Encoding: chunked' -H 'Expect: 100-continue' -d @"$folder/large")"
is 'two on one connection' '2' "$(ask /v1/models "http://localhost/v1/models" | grep -o '"object":"list"' | wc -l)"
echo "curl: $n checks"
