"""OpenAI's Responses and Anthropic's Messages, for agents that use nothing else (rolemodel/environments/endpoint.py).
vLLM's own converters turn a request into a chat and the reply back, so the policy is trained on the prompts that `vllm
serve` would make. Importing the converters takes seconds."""

import json
from functools import cache
from itertools import count
from pathlib import Path

from jinja2 import TemplateError
from pydantic_core import to_jsonable_python
from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_input_messages,
    construct_tool_dicts,
)

from rolemodel.environments.endpoint import part_of


class Responses:
    """/v1/responses. Nothing is stored, so each request must have the whole conversation, as those of Codex do."""

    # Keys that are converted or change nothing.
    KNOWN = set(
        "input instructions tools tool_choice max_output_tokens text include store background truncation reasoning "
        "previous_response_id stream prompt_cache_key client_metadata model user metadata service_tier".split()
    )

    async def to_chat(body: dict, state: dict) -> dict:
        if body.get("previous_response_id"):
            raise ValueError("previous_response_id: nothing is stored here, send the whole conversation")
        for item in body["input"] if isinstance(body["input"], list) else ():
            parts = item.get("content")
            if item.get("role") == "assistant" and isinstance(parts, list):  # vLLM would take only the first part
                parts[:] = [parts[0] | {"text": "".join(part_of(part, "text") for part in parts)}]
        request = ResponsesRequest.model_validate(body)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        chat = {key: value for key, value in body.items() if key not in Responses.KNOWN}
        chat["messages"] = to_jsonable_python(messages, exclude_none=True)
        for message in chat["messages"]:
            if isinstance(message.get("content"), list):  # input_text, which /v1/chat/completions refuses
                message["content"] = [{"type": "text", "text": part_of(part, "text")} for part in message["content"]]
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        chat |= {"tools": tools, "tool_choice": to_jsonable_python(request.tool_choice)}
        chat["reasoning_effort"] = request.reasoning and request.reasoning.effort
        form = (body.get("text") or {}).get("format") or {"type": "text"}
        return chat | {"max_tokens": body.get("max_output_tokens"), "response_format": form}

    def from_chat(reply: dict, body: dict) -> dict:
        choice = reply["choices"][0]
        message = choice["message"]
        calls = [FunctionCall(id=call["id"], **call["function"]) for call in message.get("tool_calls", [])]
        tools = ResponsesRequest.model_validate(body).tools
        items = build_response_output_items(message.get("reasoning"), message["content"], calls, tools=tools)
        is_cut = choice["finish_reason"] == "length"
        usage = reply["usage"]
        counts = {"input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0}}
        counts |= {"output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": f"resp_{reply['id']}",
            "object": "response",
            "created_at": reply["created"],
            "model": reply["model"],
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "output": [item.model_dump(mode="json", exclude_none=True) for item in items],
            "usage": counts | {"total_tokens": usage["total_tokens"]},
            "tools": body.get("tools") or [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "metadata": {},
        }

    def events(reply: dict, body: dict):
        number = count()

        def event(kind, **what):
            return {"type": f"response.{kind}", "sequence_number": next(number)} | what

        response = Responses.from_chat(reply, body)
        begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        for i, item in enumerate(response["output"]):
            at = {"output_index": i, "item_id": item["id"]}
            if item["type"] == "message":
                yield event("output_item.added", output_index=i, item=item | {"content": [], "status": "in_progress"})
                part = item["content"][0]
                at["content_index"] = 0
                yield event("content_part.added", **at, part=part | {"text": ""})
                yield event("output_text.delta", **at, delta=part["text"], logprobs=[])
                yield event("output_text.done", **at, text=part["text"], logprobs=[])
                yield event("content_part.done", **at, part=part)
            elif item["type"] == "function_call":
                yield event("output_item.added", output_index=i, item=item | {"arguments": "", "status": "in_progress"})
                yield event("function_call_arguments.delta", **at, delta=item["arguments"])
                yield event("function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
            elif item["type"] == "custom_tool_call":
                yield event("output_item.added", output_index=i, item=item | {"input": ""})
                yield event("custom_tool_call_input.delta", **at, delta=item["input"])
                yield event("custom_tool_call_input.done", **at, input=item["input"])
            else:  # reasoning
                yield event("output_item.added", output_index=i, item=item | {"content": []})
            yield event("output_item.done", output_index=i, item=item)
        yield event(response["status"], response=response)


@cache
class Converter(AnthropicServingMessages):
    """vLLM's converter, set up for the run's chat template as vLLM's server would do it."""

    def __init__(self, model: str, chat_template: str):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.template = Path(chat_template).read_text() if chat_template else self.tokenizer.get_chat_template()
        self.merges = self._detect_merge_inline_system(self.template)
        self._disabled_thinking_effort = None  # _get_disabled_thinking_effort() finds out

    async def _render_probe_prompt(self, effort):
        more = {"reasoning_effort": effort, "enable_thinking": effort != "none", "add_generation_prompt": True}
        more |= {"chat_template": self.template, "tokenize": False}
        try:
            return self.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], **more)
        except TemplateError:
            return None


class Messages:
    """/v1/messages of Anthropic."""

    KNOWN = set(
        "messages system tools tool_choice max_tokens stop_sequences stream model metadata output_config "
        "thinking chat_template_kwargs".split()
    )

    async def to_chat(body: dict, state: dict) -> dict:
        request = AnthropicMessagesRequest.model_validate(body)
        converter = Converter(state["cfg"].run.model, state["cfg"].run.chat_template)
        effort = await converter._get_disabled_thinking_effort()
        found = converter.to_chat_completion_request(
            request, merge_inline_system=converter.merges, disabled_thinking_effort=effort
        )
        names = {"messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "stop"}
        names |= {"reasoning_effort", "chat_template_kwargs", "thinking_token_budget", "response_format"}
        chat = {key: value for key, value in body.items() if key not in Messages.KNOWN}
        return chat | found.model_dump(mode="json", include=names, exclude_none=True)

    def from_chat(reply: dict, body: dict) -> dict:
        chat = ChatCompletionResponse.model_validate(reply)
        for tool_call in chat.choices[0].message.tool_calls:
            # Arguments must be a JSON object. Others are put into one, and the agent will report what is wrong.
            tool_call.function.arguments = tool_call.function.arguments or "{}"
            try:
                dict(**json.loads(tool_call.function.arguments))
            except (TypeError, ValueError):
                tool_call.function.arguments = json.dumps({"arguments": tool_call.function.arguments})
        found = AnthropicServingMessages.messages_full_converter(None, chat)  # it does not use its `self`
        return {"stop_sequence": None} | found.model_dump(mode="json", exclude_none=True)

    def events(reply: dict, body: dict):
        message = Messages.from_chat(reply, body)
        begun = message | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": begun}
        for i, block in enumerate(message["content"]):
            start = dict(block)
            if block["type"] == "tool_use":
                start["input"] = {}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            elif block["type"] == "thinking":
                start |= {"thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            else:
                start["text"] = ""
                deltas = [{"type": "text_delta", "text": block["text"]}]
            yield {"type": "content_block_start", "index": i, "content_block": start}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": i, "delta": delta}
            yield {"type": "content_block_stop", "index": i}
        end = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
        yield {"type": "message_stop"}


FORMATS = {"responses": Responses, "messages": Messages}
