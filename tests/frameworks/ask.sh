#!/bin/bash
# An agent in a line: asks once, and prints the whole reply.
exec curl -sf "$OPENAI_BASE_URL/chat/completions" -d "{\"messages\": [{\"role\": \"user\", \"content\": \"$1\"}]}"
