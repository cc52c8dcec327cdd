"""The ids that demonstrations and --offline train are those that the policy would sample. Tiny tokenizers with the chat
templates of public models and their stop tokens; the expected tokens are written by hand."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import transformers
from conftest import BASE, all_batches
from openai.types.chat import ChatCompletion
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from configs import load_config
from configs.models.demonstrations import as_template_sees, up_to_string
from configs.runtime.role import DATA, RunError
from tools import evaluate

ROLES = "{% for m in messages %}"
START = "{% if add_generation_prompt %}"
QWEN = ROLES + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + START
QWEN += "<|im_start|>assistant\n{% endif %}"
LLAMA = "<|begin_of_text|>" + ROLES + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
LLAMA += "<|eot_id|>{% endfor %}" + START + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
GEMMA = "<bos>" + ROLES + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
GEMMA += "<end_of_turn>\n{% endfor %}" + START + "<start_of_turn>model\n{% endif %}"
PHI = ROLES + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + START + "<|assistant|>\n{% else %}"
PHI += "<|endoftext|>{% endif %}"
GLM = "[gMASK]<sop>" + ROLES + "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
GLM += START + "<|assistant|>{% endif %}"
MISTRAL = "<s>" + ROLES + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>"
MISTRAL += "{% endif %}{% endfor %}"
DEEPSEEK = "<|bos|>" + ROLES + "{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>{{ m.content }}"
DEEPSEEK += "<|eos|>{% endif %}{% endfor %}" + START + "<|Assistant|>{% endif %}"
R1 = DEEPSEEK.replace("<|Assistant|>{{ m.content }}", "<|Assistant|>{{ m.content.split('</think>')[-1] }}")
R1 = R1.replace("<|Assistant|>{% endif %}", "<|Assistant|><think>\n{% endif %}")
GPT_OSS = ROLES + "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}<|start|>assistant"
GPT_OSS += "{% if m.reasoning_content and loop.last %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
GPT_OSS += "<|start|>assistant{% endif %}<|channel|>final<|message|>{{ m.content }}"
GPT_OSS += "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}"
GPT_OSS += START + "<|start|>assistant{% endif %}"

ASK = {"role": "user", "content": "q"}
SAY = {"role": "assistant", "content": "b a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FINAL = ["<|channel|>", *"final", "<|message|>"]
# name: (special tokens with bos "" or first, template, the tokenizer's eos, generation_config's)
FORMS = {
    "Qwen": ("<|im_start|> <|im_end|> <|endoftext|>", QWEN, "<|im_end|>", "<|im_end|> <|endoftext|>"),
    "Llama": ("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|end_of_text|>", LLAMA,
              "<|end_of_text|>", "<|end_of_text|> <|eom_id|> <|eot_id|>"),
    "Gemma": ("<bos> <start_of_turn> <end_of_turn> <eos>", GEMMA, "<eos>", "<eos> <end_of_turn>"),
    "Phi": ("<|user|> <|assistant|> <|end|> <|endoftext|>", PHI, "<|endoftext|>",
            "<|endoftext|> <|assistant|> <|end|>"),
    "GLM": ("[gMASK] <sop> <|user|> <|assistant|> <|observation|> <|endoftext|>", GLM, "<|endoftext|>",
            "<|endoftext|> <|user|> <|observation|>"),
    "Mistral": ("<s> </s> [INST] [/INST]", MISTRAL, "</s>", "</s>"),
    "DeepSeek": ("<|bos|> <|eos|> <|User|> <|Assistant|>", DEEPSEEK, "<|eos|>", "<|eos|>"),
    "R1": ("<|bos|> <|eos|> <|User|> <|Assistant|> <|pad|>", R1, "<|pad|>", "<|eos|>"),
    "GPT-OSS": ("<|start|> <|channel|> <|message|> <|end|> <|return|> <|call|> <|endoftext|>", GPT_OSS, "<|return|>",
                "<|return|> <|endoftext|> <|call|>"),
}  # fmt: skip
HAVE_BOS = ("Llama", "Gemma", "Mistral", "DeepSeek")  # also before a prompt of text
# What the policy samples in a conversation of two turns, then its whole first sequence.
BA = [*"b a"]
EXPECTED = {
    "Qwen": ([*BA, "<|im_end|>", *BA, "<|im_end|>"],
             "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nb a<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
             "<|im_start|>assistant\nb a<|im_end|>"),
    "Llama": ([*BA, "<|eot_id|>", *BA, "<|eot_id|>"],
              "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant"
              "<|end_header_id|>\n\nb a<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\nb a<|eot_id|>"),
    "Gemma": ([*BA, "<end_of_turn>", *BA, "<end_of_turn>"],
              "<bos><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\nb a<end_of_turn>\n"
              "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\nb a<end_of_turn>"),
    "Phi": ([*BA, "<|end|>", *BA, "<|end|>"],
            "<|user|>\nq<|end|>\n<|assistant|>\nb a<|end|>\n<|user|>\nq<|end|>\n<|assistant|>\nb a<|end|>"),
    "GLM": (["\n", *BA, "<|user|>", "\n", *BA, "<|user|>"],
            "[gMASK]<sop><|user|>\nq<|assistant|>\nb a<|user|>\nq<|assistant|>\nb a<|user|>"),
    "Mistral": (["▁b", "▁a", "</s>", "▁b", "▁a", "</s>"], "<s>[INST]▁q[/INST]▁b▁a</s>[INST]▁q[/INST]▁b▁a</s>"),
    "DeepSeek": ([*BA, "<|eos|>", *BA, "<|eos|>"],
                 "<|bos|><|User|>q<|Assistant|>b a<|eos|><|User|>q<|Assistant|>b a<|eos|>"),
    # It forks: in the second prompt the first answer ends with another token.
    "GPT-OSS": ([*FINAL, *BA, "<|return|>", *FINAL, *BA, "<|return|>"],
                "<|start|>user<|message|>q<|end|><|start|>assistant<|channel|>final<|message|>b a<|return|>"),
}  # fmt: skip


@pytest.fixture
def trained(tmp_path):
    """trained(name, kind, *data) -> the tokens of each sequence, and those of them that have a weight."""

    def save(name):
        """A tokenizer of one token per character; Mistral's has a mark for a space, and writes one before each text."""
        special, template, eos, stops = FORMS[name]
        special = special.split()
        is_marked = name == "Mistral"
        vocab = [*special, *map(chr, range(32, 127)), "\n", "▁"]
        merges = [("▁", letter) for letter in "abq24"] if is_marked else [("=", "="), ("4", "2"), ("\n", "\n")]
        vocab = {token: i for i, token in enumerate([*vocab, *map("".join, merges)])}
        tokenizer = Tokenizer(models.BPE(vocab, merges))
        if is_marked:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            tokenizer.decoder = decoders.Metaspace()
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
            tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        bos = special[0] if name in HAVE_BOS else None
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, vocab[bos])])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
        fast.chat_template = template
        fast.save_pretrained(tmp_path / "model")
        transformers.Qwen3Config(eos_token_id=None).save_pretrained(tmp_path / "model")
        ids = [vocab[stop] for stop in stops.split()]
        transformers.GenerationConfig(eos_token_id=ids).save_pretrained(tmp_path / "model")
        return fast

    def go(name, kind, *data, stop="[]"):
        tokenizer = save(name)
        (tmp_path / "run.toml").write_text(BASE.format(model=tmp_path / "model").replace("= 64", "= 512"))
        rows = [json.dumps({"example": 0, "reward": i} | line) + "\n" for i, line in enumerate(data)]
        (tmp_path / "data.jsonl").write_text("".join(rows))
        more = [f"output_dir={tmp_path}", "run_name=it", f"orchestrator.sampling.stop={stop}"]
        evaluate.main([str(tmp_path / "run.toml"), f"--{kind}", str(tmp_path / "data.jsonl"), *more])
        (batch,) = all_batches(tmp_path / f"it-{kind}")
        weight = "mask" if kind == "offline" else "ce"
        found = []
        for s in batch.sequences:
            trained = s["tokens"][s[weight] != 0]
            found.append([tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in (s["tokens"], trained)])
        return found

    return go


@pytest.mark.parametrize("kind", ["offline", "demonstrations"])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_conversation(name, kind, trained):
    line = {"prompt": [ASK], "completion": [SAY, ASK, SAY]}
    said, whole = EXPECTED[name]
    found = trained(name, kind, line, line)
    num = len(found) // 2
    assert sum([x for _, x in found[:num]], []) == said and found[num:] == found[:num]
    assert "".join(found[0][0]) == whole and num == (2 if name == "GPT-OSS" else 1)


@pytest.mark.parametrize("name, answer, said", [
    # A turn that calls a tool ends with the token that begins the tool's answer.
    ("GLM", {"content": "b a", "tool_calls": [CALL]}, ["\n", *BA, "<|observation|>"]),
    # A thought ends with a token that does not stop the turn.
    ("GPT-OSS", {"content": "b a", "reasoning": "q"},
     ["<|channel|>", *"analysis", "<|message|>", "q", "<|end|>", "<|start|>", *"assistant", *FINAL, *BA, "<|return|>"]),
    # The prompt opens a thought, and the template takes it away from the answer.
    ("R1", {"content": "a</think>b"}, [*"a</think>b", "<|eos|>"]),
    # A text that would merge with the end of its prompt.
    ("Phi", {"content": "\nb"}, ["\n", "b", "<|end|>"]),
])  # fmt: skip
def test_a_turn(name, answer, said, trained):
    (found,) = trained(name, "demonstrations", {"prompt": [ASK], "completion": [{"role": "assistant"} | answer]})
    assert found[1] == said


def test_a_turn_whose_ids_nobody_knows_is_named(trained):
    answer = {"role": "assistant", "content": "b", "reasoning": "a"}
    with pytest.raises(RunError, match="DataError..the chat template does not begin message 1 with its own") as e:
        trained("R1", "demonstrations", {"prompt": [ASK], "completion": [answer]})
    assert e.value.code == DATA


@pytest.mark.parametrize("name, prompt, completion, whole, num", [
    ("Mistral", "2+2=", "4", ["<s>", "▁2", *"+2=4", "</s>"], 2),  # and no mark before the 4
    ("Mistral", "2+2=", " 4", ["<s>", "▁2", *"+2=", "▁4", "</s>"], 2),
    ("Mistral", "2+2=", "4</s>", ["<s>", "▁2", *"+2=4", "</s>"], 2),  # a stop token in the text is the end
    ("Gemma", "2+2=", "4", ["<bos>", *"2+2=4", "<eos>"], 2),
    ("Gemma", "2+2=", ["4<end_of_turn>", "b"], ["<bos>", *"2+2=4", "<end_of_turn>"], 2),
    ("Qwen", "2=", "=4", [*"2==4", "<|im_end|>"], 3),  # "==" is one token, which the prompt has half of
    ("Qwen", "4", "2", [*"42", "<|im_end|>"], 2),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["offline", "demonstrations"])
def test_text(name, kind, prompt, completion, whole, num, trained):
    line = {"prompt": prompt, "completion": completion}
    found = trained(name, kind, line, line)
    assert found == [[whole, whole[-num:]]] * 2


@pytest.mark.parametrize("line, said", [
    ({"prompt": "2+2=", "completion": "4b a"}, [*"4b"]),
    ({"prompt": "2+2=", "completion": "4"}, ["4", "<eos>"]),
    ({"prompt": [ASK], "completion": [SAY]}, ["b"]),
])  # fmt: skip
def test_a_stop_string_ends_a_turn_without_a_stop_token(line, said, trained):
    """The turn keeps the string, as in training."""
    ((_, found),) = trained("Gemma", "demonstrations", line, stop='["b"]')
    assert found == said


def test_a_truncated_text_has_no_end(trained):
    line = {"prompt": "2+2=", "completion": "4"}
    _, cut = trained("Gemma", "offline", line, line | {"truncated": True})
    assert cut == [["<bos>", *"2+2=4"], []]


@pytest.mark.parametrize("reason, kept", [("</a>", "b a</a>"), (106, "b a"), (None, "b a")])
def test_an_answer_keeps_the_string_that_stopped_it(reason, kept):
    """vLLM names it, or the id of a stop token; other servers say nothing of it."""
    message = {"role": "assistant", "content": "b a"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    choice |= {} if reason is None else {"stop_reason": reason}
    head = {"id": "", "created": 0, "model": "m", "object": "chat.completion"}
    reply = ChatCompletion.model_validate(head | {"choices": [choice]})

    async def create(**asked):
        return reply

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    said = asyncio.run(evaluate.make_ask(client, "m", {})([{"role": "user", "content": "a"}]))
    assert said.message["content"] == said.raw["choices"][0]["message"]["content"] == kept


def test_evaluations_sample_special_tokens_as_training_does(tmp_path):
    toml = tmp_path / "some.toml"
    toml.write_text('model = "m"\n[env]\nid = "e"\n[orchestrator.sampling]\nskip_special_tokens = false\n')
    assert evaluate.sampling_of(load_config(toml), False)["extra_body"] == {"skip_special_tokens": False}


def test_the_first_of_several_stop_strings_ends_a_turn():
    assert up_to_string("4b a", ["a", "b"]) == ("4b", True)


@pytest.mark.parametrize("arguments, seen", [('{"x": 7}', {"x": 7}), ({"x": 7}, {"x": 7}), ("x = 7", {})])
def test_a_template_sees_a_calls_arguments_as_an_object(arguments, seen):
    """OpenAI's format has them as text."""
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}
    assert as_template_sees(message)["tool_calls"][0]["function"] == {"name": "f", "arguments": seen}
