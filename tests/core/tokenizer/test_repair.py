"""Faults put into tokenizers are found, repaired once, and reported."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from jinja2 import TemplateError
from merge_cases import small_tokenizer
from peft import LoraConfig, get_peft_model
from tokenizers import processors
from transformers import AddedToken, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from unsloth_plugins.core.errors import ConfigError, UnsupportedError
from unsloth_plugins.core.tokenizer import assistant_labels, check_tokenizer, repair_tokenizer, resize_embeddings
from unsloth_plugins.core.tokenizer.templates import CHATML, HARMONY, with_markers

README = Path(__file__).parents[3] / "core" / "tokenizer" / "README.md"
PLAIN_CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """ChatML with a reserved token to spare, all well."""
    tokenizer = small_tokenizer(size=130)
    special = ["<|im_start|>", "<|im_end|>", "<|reserved_0|>", "<|reserved_1|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHATML
    for name, value in options.items():
        setattr(tokenizer, name, value)
    return tokenizer


def codes(model: Any, tokenizer: Any) -> set[str]:
    """Of all findings."""
    return {finding.code for finding in check_tokenizer(model, tokenizer)}


def _state(tokenizer: Any) -> Any:
    return (
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        tokenizer.padding_side,
    )


def test_a_good_tokenizer_has_no_findings_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = chat_tokenizer()
    before = _state(tokenizer)
    assert check_tokenizer(160, tokenizer) == []
    report = repair_tokenizer(160, tokenizer)
    assert report.done == report.left == [] and _state(tokenizer) == before and not caplog.records


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_case_6_padding_is_never_the_end(pad: str | None, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = chat_tokenizer(pad_token=pad, padding_side="left")
    vocabulary = dict(tokenizer.get_vocab())
    del vocabulary["<pad>"]  # what an ordinary model lacks; it stays in the real one and would be taken
    model = tiny_llama(eos_token_id=tokenizer.eos_token_id)
    if pad is not None:
        assert codes(model, tokenizer) == {"pad-is-eos"}
    with caplog.at_level(logging.WARNING):
        report = repair_tokenizer(model, tokenizer)
    assert len(report.done) == 1 and report.left == [] and "Repaired pad-" in caplog.text
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id) and tokenizer.pad_token_id < 160
    assert model.config.pad_token_id == tokenizer.pad_token_id and tokenizer.padding_side == "left"
    rows = [tokenizer(f"{text}<|im_end|>") for text in ("the fox", "the quick brown fox", "a dog")]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)([dict(row) for row in rows])
    is_pad = batch["attention_mask"] == 0
    assert (batch["labels"][is_pad] == -100).all() and is_pad.any()
    assert (batch["labels"][batch["input_ids"] == tokenizer.eos_token_id] == tokenizer.eos_token_id).all()
    assert (batch["input_ids"] == tokenizer.eos_token_id).sum() == 3
    before = _state(tokenizer)
    assert repair_tokenizer(model, tokenizer).done == [] and _state(tokenizer) == before


def _without_spare(reserved: bool) -> PreTrainedTokenizerFast:
    tokenizer = small_tokenizer(size=130, pad_token=None)
    backend = tokenizer.backend_tokenizer.to_str().replace("<pad>", "<nil>").replace("<extra>", "<more>")
    out = PreTrainedTokenizerFast(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(backend))
    out.eos_token = out.pad_token = "</s>"
    if reserved:
        out.add_special_tokens({"additional_special_tokens": ["<|reserved_special_token_7|>"]})
    return out


def test_case_6_a_spare_token_else_an_unused_row_else_growth() -> None:
    tokenizer = _without_spare(reserved=True)
    size = len(tokenizer)
    repair_tokenizer(160, tokenizer)
    assert tokenizer.pad_token == "<|reserved_special_token_7|>" and len(tokenizer) == size
    tokenizer = _without_spare(reserved=False)
    size = len(tokenizer)
    assert "unused row" in repair_tokenizer(160, tokenizer).done[0]
    assert tokenizer.pad_token_id == size and size < 160
    tokenizer = _without_spare(reserved=False)
    model = tiny_llama(vocab_size=size)
    old = model.get_input_embeddings().weight.detach().clone()
    assert f"grew from {size} to {size + 1} rows" in repair_tokenizer(model, tokenizer).done[0]
    assert torch.equal(model.get_input_embeddings().weight[:size], old) and tokenizer.pad_token_id == size


def test_case_6_no_padding_without_a_row_for_it() -> None:
    """A folder's model cannot grow: an id beyond its embedding would be worse than the fault."""
    tokenizer = _without_spare(reserved=False)
    before = _state(tokenizer)
    report = repair_tokenizer(len(tokenizer), tokenizer)
    assert report.done == [] and _state(tokenizer) == before
    assert {finding.code for finding in report.left} == {"pad-is-eos", "chat-template-missing"}
    repair_tokenizer(len(tokenizer) + 1, tokenizer)
    assert tokenizer.pad_token_id == len(tokenizer) - 1 and tokenizer.pad_token_id != tokenizer.eos_token_id


def test_case_11_resizing_never_cuts() -> None:
    tokenizer = small_tokenizer(size=149)
    assert len(tokenizer) == 150
    for rows in (200, 150):
        model, mine = tiny_llama(vocab_size=rows), copy.deepcopy(tokenizer)
        before = [part.weight.detach().clone() for part in (model.get_input_embeddings(), model.lm_head)]
        mine.add_tokens(["<a>", "<b>", "<c>"])
        assert ("ids-outside-embedding" in codes(model, mine)) is (rows == 150)
        changed = resize_embeddings(model, mine)
        assert (changed is None) is (rows == 200)
        for part, old in zip((model.get_input_embeddings(), model.lm_head), before, strict=True):
            assert torch.equal(part.weight[:150], old[:150]) and len(part.weight) == max(rows, 153)
        out = model(torch.tensor([mine.convert_tokens_to_ids(["<a>", "<b>", "<c>"])]))
        assert out.logits.shape[-1] == max(rows, 153) and out.logits.isfinite().all()
        weights = [p.detach().clone() for p in model.parameters()]
        assert resize_embeddings(model, mine) is None
        assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))


def test_dry_run_names_everything_and_changes_nothing() -> None:
    tokenizer = chat_tokenizer(pad_token="<|im_end|>", eos_token="</s>", chat_template=PLAIN_CHATML)
    tokenizer.add_tokens([f"<new{n}>" for n in range(40)])
    model = tiny_llama(eos_token_id=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("<new0>")] = 0
    before, weights = _state(tokenizer), copy.deepcopy(model.state_dict())
    plan = repair_tokenizer(model, tokenizer, dry_run=True)
    assert _state(tokenizer) == before and model.config.eos_token_id == 1
    assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())
    done = repair_tokenizer(model, tokenizer)
    assert plan.dry_run and plan.done == done.done and done.left == []
    kinds = [entry.split(":")[0] for entry in done.done]
    assert set(kinds) == {
        "generation-markers-missing",
        "eos-is-not-end-of-turn",
        "ids-outside-embedding",
        "pad-is-eos",
        "zero-embedding",
    }
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id in model.config.eos_token_id
    assert repair_tokenizer(model, tokenizer).done == [] and check_tokenizer(model, tokenizer) == []


def test_a_number_of_rows_stands_for_the_model() -> None:
    broken = dict(eos_token="</s>", pad_token=None, chat_template=PLAIN_CHATML)
    plan = repair_tokenizer(160, chat_tokenizer(**broken), dry_run=True)
    tokenizer = chat_tokenizer(**broken)
    assert repair_tokenizer(160, tokenizer).done == plan.done and len(plan.done) == 3
    assert check_tokenizer(160, tokenizer) == []


def test_the_end_token_follows_the_template_and_the_model_stops_there() -> None:
    """What a GGUF of SmolLM2 gives: its end token is the start of a turn, and there is no padding."""
    tokenizer = chat_tokenizer(eos_token="<|im_start|>", pad_token=None)
    model = tiny_llama(eos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"))
    assert {"eos-is-not-end-of-turn", "pad-missing"} <= codes(model, tokenizer)
    repair_tokenizer(model, tokenizer)
    assert tokenizer.eos_token == "<|im_end|>" and check_tokenizer(model, tokenizer) == []
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    good = chat_tokenizer(eos_token="</s>")
    config = tiny_llama(eos_token_id=[1, good.convert_tokens_to_ids("<|im_end|>")]).config
    assert codes(config, good) == set()  # the model stops at the end of a turn, whatever the tokenizer says


def test_double_bos() -> None:
    tokenizer = chat_tokenizer()
    ids = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A", pair="<s> <s> $A $B", special_tokens=ids
    )
    assert codes(160, tokenizer) == {"double-bos"}
    repair_tokenizer(160, tokenizer)
    assert tokenizer("the").input_ids[0] == 2 and tokenizer("the").input_ids[1] != 2
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    report = repair_tokenizer(160, tokenizer)
    assert report.done == [] and [finding.code for finding in report.left] == ["double-bos-in-chats"]
    assert report.left[0].caution


def test_wrong_flags_are_set_right() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", single_word=True, special=False)])
    if "special-token-splits" not in codes(160, tokenizer):
        pytest.fail("the fault could not be made")
    repair_tokenizer(160, tokenizer)
    number = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert number in tokenizer("a<|im_end|>b").input_ids and check_tokenizer(160, tokenizer) == []


def test_byte_fallback_of_a_byte_level_tokenizer_goes() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.model.byte_fallback = True
    assert codes(160, tokenizer) == {"byte-fallback"}
    repair_tokenizer(160, tokenizer)
    assert check_tokenizer(160, tokenizer) == []


def test_case_35_markers_are_added_where_the_text_stays_equal() -> None:
    tokenizer = chat_tokenizer(chat_template=PLAIN_CHATML)
    chat = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": "the dog"},
        {"role": "user", "content": "over"},
        {"role": "assistant", "content": "lazy"},
    ]
    with pytest.raises(ConfigError, match="no generation markers"):
        assistant_labels(tokenizer, chat)
    before = tokenizer.apply_chat_template(chat, tokenize=False)
    assert "they cover 'an answer<|im_end|>'" in repair_tokenizer(160, tokenizer).done[0]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == before
    out = assistant_labels(tokenizer, chat)
    kept = [label for label in out["labels"] if label >= 0]
    assert tokenizer.decode(kept) == "the dog<|im_end|>lazy<|im_end|>"
    with pytest.raises(ConfigError, match="no assistant spoke"):
        assistant_labels(tokenizer, chat[:1])
    unreached = PLAIN_CHATML.replace("{{'<|im", "{% if message.role == 'tool' %}{{'<|im", 1) + "{% endif %}{% endfor %}"
    unreached = unreached.replace("{% endfor %}", "{% endif %}{% endfor %}", 1).removesuffix("{% endif %}{% endfor %}")
    tokenizer.chat_template = unreached + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert with_markers(tokenizer.chat_template) and repair_tokenizer(160, tokenizer).done == []
    tokenizer.chat_template = PLAIN_CHATML.replace(" + '<|im_end|>'", "}}{{ '<|im_end|>'")
    assert with_markers(tokenizer.chat_template) and repair_tokenizer(160, tokenizer).done == []
    odd = "{% for message in messages %}{{ render(message) }}{% endfor %}"
    assert with_markers(odd) is None


def test_a_template_is_given_by_name_only_where_its_tokens_are() -> None:
    tokenizer = chat_tokenizer(chat_template=None, eos_token="</s>")
    report = repair_tokenizer(160, tokenizer)
    assert [finding.code for finding in report.left] == ["chat-template-missing"]
    report = repair_tokenizer(160, tokenizer, chat_template="chatml")
    assert tokenizer.chat_template == CHATML and tokenizer.eos_token == "<|im_end|>" and report.left == []
    with pytest.raises(ConfigError, match=r"without <\|start\|>, <\|channel\|>"):
        repair_tokenizer(160, chat_tokenizer(chat_template=None), chat_template="harmony")


def test_tokens_of_chatml_are_added_on_request() -> None:
    tokenizer = small_tokenizer(size=149)
    model = tiny_llama(vocab_size=150, eos_token_id=1)
    rows = model.get_input_embeddings().weight.detach().clone()
    with pytest.raises(ConfigError, match="--add-tokens"):
        repair_tokenizer(model, tokenizer, chat_template="chatml")
    with pytest.raises(ConfigError, match="without"):
        repair_tokenizer(model, tokenizer, chat_template="harmony", add_tokens=True)
    plan = repair_tokenizer(model, tokenizer, chat_template="chatml", add_tokens=True, dry_run=True)
    assert len(tokenizer) == 150 and len(model.get_input_embeddings().weight) == 150
    report = repair_tokenizer(model, tokenizer, chat_template="chatml", add_tokens=True)
    assert report.done == plan.done and report.left == [] and check_tokenizer(model, tokenizer) == []
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (start, end) == (150, 151) and tokenizer.eos_token_id == end and model.config.eos_token_id == [end, 1]
    assert len(model.lm_head.weight) == 152 and torch.equal(model.get_input_embeddings().weight[:150], rows)
    labels = assistant_labels(tokenizer, [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}])
    assert [label for label in labels["labels"] if label >= 0][-1] == end
    assert repair_tokenizer(model, tokenizer, chat_template="chatml", add_tokens=True).done == []


@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML])
def test_chatml_without_its_tokens_is_found_and_repaired(template: str) -> None:
    tokenizer = small_tokenizer(size=149, chat_template=template)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in (None, tokenizer.unk_token_id)
    model = tiny_llama(vocab_size=150, eos_token_id=1)
    (finding,) = [each for each in check_tokenizer(model, tokenizer) if each.code == "end-of-turn-missing"]
    assert "<|im_end|>" in finding.message and "--add-tokens" in str(finding.repair) and not finding.caution
    assert finding in repair_tokenizer(model, tokenizer).left and len(tokenizer) == 150
    plan = repair_tokenizer(model, tokenizer, add_tokens=True, dry_run=True)
    assert len(tokenizer) == 150 and plan.left == []
    report = repair_tokenizer(model, tokenizer, add_tokens=True)
    assert report.done == plan.done and report.left == [] and check_tokenizer(model, tokenizer) == []
    assert report.done[0] == "end-of-turn-missing: <|im_start|>, <|im_end|> are special tokens now"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == end and model.config.eos_token_id == [end, 1]
    assert len(model.lm_head.weight) == 152
    assert repair_tokenizer(model, tokenizer, add_tokens=True).done == []


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("", "with nothing"),
        ("{% if not loop.last %}{{ eos_token }}{% endif %}", "with nothing"),
        ("{{ '\n### END' }}", "'### END'"),
        ("{{ '<|eot_id|>' }}", "'<|eot_id|>'"),
    ],
)
def test_a_template_without_an_end_after_the_last_answer_is_found(end: str, shown: str) -> None:
    tokenizer = small_tokenizer(size=130)
    start = "{% for m in messages %}{{ m.role + ': ' + m.content }}"
    tokenizer.chat_template = start + end + "{% endfor %}"
    (finding,) = [each for each in check_tokenizer(160, tokenizer) if each.code == "end-of-turn-missing"]
    assert shown in finding.message and finding.repair is None and not finding.caution
    assert finding in repair_tokenizer(160, tokenizer, add_tokens=True).left and len(tokenizer) == 131
    tokenizer.chat_template = start + "{{ eos_token }}{% endfor %}"
    assert "end-of-turn-missing" not in codes(160, tokenizer)


REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
) + PLAIN_CHATML


def test_a_template_that_refuses_a_system_message_is_repaired_like_others() -> None:
    tokenizer = chat_tokenizer(chat_template=REFUSES_SYSTEM)
    assert codes(160, tokenizer) == {"generation-markers-missing"}
    report = repair_tokenizer(160, tokenizer)
    assert "they cover 'an answer<|im_end|>'" in report.done[0] and report.left == []
    with pytest.raises(TemplateError, match="System role"):
        tokenizer.apply_chat_template([{"role": "system", "content": "a"}], tokenize=False)


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}",
        "{{ raise_exception('no') }}",
        "{{ messages[7].content.x }}",
        "{{ 1 + 'a' }}",
        {"rag": CHATML},
    ],
)
def test_a_broken_template_is_a_finding(template: Any) -> None:
    tokenizer = chat_tokenizer(chat_template=template)
    (finding,) = check_tokenizer(160, tokenizer)
    assert finding.code == "chat-template-broken" and "cannot render" in finding.message
    report = repair_tokenizer(160, tokenizer)
    assert report.done == [] and report.left == [finding] and tokenizer.chat_template == template
    assert "chatml" in repair_tokenizer(160, tokenizer, chat_template="chatml").done[0]
    assert tokenizer.chat_template == CHATML and check_tokenizer(160, tokenizer) == []


@pytest.mark.parametrize("chat_template", [None, "{{ raise_exception('no') }}"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_given_template_that_is_broken_too_is_refused(chat_template: str | None, dry_run: bool) -> None:
    tokenizer = chat_tokenizer(chat_template=chat_template)
    given = "{% for message in messages %}\n\n{{ message.content }\n{% endfor %}"
    with pytest.raises(ConfigError, match=r"TemplateSyntaxError: unexpected '}' \(line 3 of the template\)"):
        repair_tokenizer(160, tokenizer, chat_template=given, dry_run=dry_run)
    assert tokenizer.chat_template == chat_template


def test_a_template_that_cannot_be_marked_is_a_caution() -> None:
    tokenizer = chat_tokenizer(chat_template=PLAIN_CHATML.replace(" + '<|im_end|>'", "}}{{ '<|im_end|>'"))
    (finding,) = check_tokenizer(160, tokenizer)
    assert finding.caution and finding.repair is None and "cannot be added to this one" in finding.message
    (finding,) = check_tokenizer(160, chat_tokenizer(chat_template=PLAIN_CHATML))
    assert not finding.caution and finding.repair


def test_harmony_does_not_change_with_the_day() -> None:
    text = chat_tokenizer(chat_template=HARMONY).apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert "date" not in text and "cutoff" not in text and "leaves out" in README.read_text()


def test_a_processor_stands_for_its_tokenizer() -> None:
    tokenizer = chat_tokenizer(chat_template=PLAIN_CHATML, pad_token=None)
    processor = SimpleNamespace(tokenizer=tokenizer, chat_template=PLAIN_CHATML)
    assert check_tokenizer(160, processor) == check_tokenizer(160, tokenizer) != []
    plan = repair_tokenizer(160, processor, dry_run=True)
    assert processor.chat_template == tokenizer.chat_template == PLAIN_CHATML
    assert repair_tokenizer(160, processor).done == plan.done and check_tokenizer(160, processor) == []
    assert processor.chat_template == tokenizer.chat_template != PLAIN_CHATML
    processor = SimpleNamespace(tokenizer=chat_tokenizer(chat_template=PLAIN_CHATML), chat_template="its own")
    assert repair_tokenizer(160, processor).done and processor.chat_template == "its own"


@pytest.mark.parametrize("call", [check_tokenizer, repair_tokenizer, resize_embeddings])
def test_what_is_no_tokenizer_is_refused(call: Any) -> None:
    for given in (None, "gpt2", SimpleNamespace(tokenizer=None)):
        with pytest.raises(ConfigError, match=f"got {type(given).__name__}. Pass what from_pretrained returned"):
            call(tiny_llama(), given)
    with pytest.raises(ConfigError, match="expected a model"):
        call(chat_tokenizer(), chat_tokenizer())
    with pytest.raises(ConfigError, match="got LlamaForCausalLM. The model comes first, then its tokenizer"):
        call(chat_tokenizer(), tiny_llama())


def test_a_chat_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat_template to be a text; got int"):
        repair_tokenizer(160, chat_tokenizer(), chat_template=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "Embedding of PEFT around the embedding"),
        ({"target_modules": ["q_proj", "lm_head"]}, "Linear of PEFT around the head"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            "ModulesToSaveWrapper of PEFT around the head",
        ),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3]}, "TrainableTokensWrapper of PEFT"),
    ],
)
def test_case_11_growth_under_adapters_is_refused_before_any_change(
    options: dict[str, Any], part: str, dry_run: bool
) -> None:
    tokenizer = small_tokenizer(size=149, chat_template=CHATML)
    model = get_peft_model(tiny_llama(vocab_size=150, eos_token_id=1), LoraConfig(r=2, **options))
    before = _state(tokenizer)
    with pytest.raises(UnsupportedError, match=f"152 rows; got {part}.*before get_peft_model"):
        repair_tokenizer(model, tokenizer, add_tokens=True, dry_run=dry_run)
    assert _state(tokenizer) == before and model.config.eos_token_id == 1
    tokenizer.add_tokens(["<a>"])
    with pytest.raises(UnsupportedError, match="151 rows"):
        resize_embeddings(model, tokenizer)
    wide = get_peft_model(tiny_llama(vocab_size=200, eos_token_id=1), LoraConfig(r=2, **options))
    assert resize_embeddings(wide, tokenizer) is None and repair_tokenizer(wide, tokenizer, add_tokens=True).done


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_that_are_zero_in_the_head(tied: bool) -> None:
    tokenizer = chat_tokenizer()
    model = tiny_llama(tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id)
    number = tokenizer.convert_tokens_to_ids("<|reserved_1|>")
    with torch.no_grad():
        model.lm_head.weight[[number, tokenizer.pad_token_id]] = 0
    assert codes(model, tokenizer) == {"zero-embedding" if tied else "zero-head"}
    plan = repair_tokenizer(model, tokenizer, dry_run=True)
    assert not model.lm_head.weight[number].any()
    assert repair_tokenizer(model, tokenizer).done == plan.done and len(plan.done) == 1
    others = torch.cat([model.lm_head.weight[:number], model.lm_head.weight[number + 1 :]])
    used = others[others.any(dim=1)]
    torch.testing.assert_close(model.lm_head.weight[number], used.mean(0), rtol=1e-5, atol=1e-7)
    assert check_tokenizer(model, tokenizer) == []
