#!/bin/sh
# The same task for a shell with curl and jq: three turns with a calculator. Prints the reward, and what it left.
set -u
record=$(cat)
answer=$(printf '%s' "$record" | jq -r .answer)
tools='[{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}}]'
messages=$(printf '%s' "$record" | jq -c '[{role: "user", content: .question}]')
text=""
for turn in 1 2 3; do
    reply=$(jq -n --argjson messages "$messages" --argjson tools "$tools" '{messages: $messages, tools: $tools}' |
        curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
            -H "Content-Type: application/json" -d @-) || { printf '%s\n' "$reply" >&2; exit 1; }
    message=$(printf '%s' "$reply" | jq -c '.choices[0].message')
    text=$(printf '%s' "$message" | jq -r '.content // ""')
    expression=$(printf '%s' "$message" | jq -r '(.tool_calls // [])[0].function.arguments // "" |
        if . == "" then "" else (fromjson | .expression // "none" | tostring) end')
    [ -n "$expression" ] || break
    case $expression in
        *[!0-9*]* | \** | *\* | *\*\** | 0*) result="Error: $expression is no product" ;;
        *) result=$(($expression)) ;;
    esac
    messages=$(jq -cn --argjson messages "$messages" --argjson message "$message" --arg result "$result" \
        '$messages + [$message] + [$message.tool_calls[] | {role: "tool", tool_call_id: .id, content: $result}]')
done
said=$(printf '%s' "$text" | grep -oE -- '-?[0-9]+' | tail -n 1)
reward=0
[ "$said" = "$answer" ] && reward=1
jq -cn --argjson reward "$reward" --arg text "$text" '{reward: $reward, text: $text}'
