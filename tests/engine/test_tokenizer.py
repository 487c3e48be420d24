"""Tokenizer and chat template: any text in, the checkpoint's own format out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.tiny_checkpoint import write_tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from engine_adapter.engine.checkpoint.loader import ModelUnusable
from engine_adapter.engine.text.chat_template import ChatTemplate, MessagesUnsuitable
from engine_adapter.engine.text.tokenizer import Tokenizer, TokenizerFiles, load_tokenizer, well_formed


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with one token per byte."""
    return load_tokenizer(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), [7])


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(
        TokenizerFiles(chat_template=source, bos_token="<s>", eos_token="</s>", adds_bos_token=False)
    )


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decode_inverts_encode(tokenizer: Tokenizer, text: str) -> None:
    """Any text without special tokens survives the way there and back."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Tokens that are parts of a character still tell their exact bytes."""
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_a_special_tokens_bytes_are_its_text(tokenizer: Tokenizer) -> None:
    """Markers are reported as they are written."""
    assert tokenizer.token_bytes(257) == b"<|im_end|>"


@given(st.text(st.characters(min_codepoint=0xD700, max_codepoint=0xE000)))
def test_any_python_string_can_be_encoded(tokenizer: Tokenizer, text: str) -> None:
    """Unpaired surrogates become U+FFFD instead of an exception."""
    tokenizer.encode(text)
    well_formed(text).encode("utf-8")


def test_paired_surrogates_become_the_character() -> None:
    """Two escapes that form one emoji are joined; the unpaired one beside it is replaced."""
    assert well_formed("\ud83d\ude00 \ud83d") == "😀 \ufffd"


def test_stop_ids_hold_the_end_of_turn_marker(tokenizer: Tokenizer) -> None:
    """A ChatML checkpoint whose config names another id as its end also ends at <|im_end|>."""
    assert tokenizer.stop_token_ids == {7, 257}


def test_truncation_of_the_training_run_is_dropped(tmp_path: Path) -> None:
    """A tokenizer.json saved with truncation and padding still encodes the whole text."""
    write_tiny_checkpoint(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.enable_truncation(4)
    fast.enable_padding(length=8)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path, []).encode("0123456789")) == 10


@pytest.mark.parametrize("content", [None, "{broken"])
def test_missing_or_broken_tokenizer_is_one_clear_line(tmp_path: Path, content: str | None) -> None:
    """The error names the file."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelUnusable, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, [])


def test_template_may_stand_in_its_own_file_or_under_a_name(tmp_path: Path) -> None:
    """chat_template.jinja wins over tokenizer_config.json; of named templates `default` is taken."""
    write_tiny_checkpoint(tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(tmp_path, []).files.chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(tmp_path, []).files.chat_template == "J"


def test_default_template_is_chatml() -> None:
    """A checkpoint without a template gets ChatML."""
    rendered = template(None).render([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_string_and_text_parts_render_alike() -> None:
    """A text given whole, as one part or as two parts gives the same prompt."""
    forms: list[object] = [
        "ab",
        [{"type": "text", "text": "ab"}],
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    ]
    rendered = {template(None).render([{"role": "user", "content": form}]) for form in forms}
    assert len(rendered) == 1


def test_developer_is_system_unless_the_template_knows_it() -> None:
    """OpenAI's newer role name reaches a template that was written before it."""
    source = "{% for m in messages %}{{ m.role }}{% endfor %}"
    messages = [{"role": "developer", "content": "x"}]
    assert template(source).render(messages) == "system"
    assert template(source + "{# developer #}").render(messages) == "developer"


def test_absent_content_and_tool_calls_reach_the_template() -> None:
    """content null is an empty string, and JSON-text arguments arrive as an object."""
    source = (
        "{% for m in messages %}[{{ m.content }}]{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}
    assert template(source).render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "[]Köln"


def test_tools_are_passed_and_json_is_not_escaped() -> None:
    """`tojson` keeps non-ASCII and HTML characters, as the model saw them in training."""
    source = "{% if tools %}{{ tools | tojson }}{% endif %}"
    assert template(source).render([], tools=[{"name": "größe<1>"}]) == '[{"name": "größe<1>"}]'


def test_special_tokens_and_generation_prompt_are_variables() -> None:
    """bos_token and add_generation_prompt mean what transformers means by them."""
    source = "{{ bos_token }}{% if add_generation_prompt %}>{% endif %}"
    assert template(source).render([]) == "<s>>"
    assert template(source).render([], add_generation_prompt=False) == "<s>"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ raise_exception('roles must alternate') }}", []),
        ("{{ messages[0].role + 1 }}", [{"role": "user", "content": "x"}]),
        ("{{ messages.__class__.__mro__ }}", []),
        ("{{ messages.append(1) }}", []),
        (None, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        (None, [{"role": "user", "content": [17]}]),
    ],
)
def test_unsuitable_messages_raise_one_error_type(
    source: str | None, messages: list[dict[str, object]]
) -> None:
    """A refusing, failing or escaping template and non-text parts all give MessagesUnsuitable."""
    with pytest.raises(MessagesUnsuitable):
        template(source).render(messages)


def test_a_template_that_does_not_compile_fails_at_start() -> None:
    """A broken template is a broken model, found before the first request."""
    with pytest.raises(ModelUnusable, match="template"):
        template("{% for %}")
