"""The tokenizer built from GGUF metadata, against transformers and against a BPE written out in Python."""

import json
import random
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from gguf import GGUFValueType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from shared.errors import ModelError
from shared.gguf_header import read_metadata
from shared.model_path import resolve
from shared.tokenizer import Tokenizer, load_tokenizer
from shared.tokenizer.detokenizer import _BYTE_OF_CHAR

TEXTS = [
    "Hello, world!",
    "def f(x):\n\treturn x ** 2  # square\r\n\n\n",
    "漢字かな交じり文 한국어 العربية हिन्दी",
    "family 👨‍👩‍👧‍👦 flag 🇪🇺 skin 👋🏽",
    "  leading,   inner \t\t and trailing   ",
    "It's we'll I'VE don't 'tis",
    "a<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "\u00a0nbsp \u200bzero \u2028line e\u0301 é",
    "\x00\x01\x7f",
    "x" * 300 + "=" * 80,
]
DIGITS = ["12345", "v1.2.3", " 7", "a  1", "1\t\t2", "x = 0x1F + ½ + ٣٤٥", "on  2024-11-29  at 10:30"]
any_text = st.text(max_size=60) | st.text("ab '12 \n\té<|>im_start漢🙂", max_size=60)


@pytest.fixture(scope="module")
def oracle() -> Any:
    """transformers' tokenizer of the same file."""
    from transformers import AutoTokenizer

    path = resolve("")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def with_digit_rule(oracle: Any) -> Any:
    """A copy of transformers' backend with the rule that it leaves out when it reads GGUF: every digit is a
    piece of its own. It matters for digits after several spaces."""
    backend = tokenizers.Tokenizer.from_str(oracle.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])  # pyright: ignore
    return backend


Merges = dict[tuple[str, str], int]


def naive_bpe(text: str, pieces: str, vocab: dict[str, int], merges: Merges, whole: bool) -> list[int]:
    """Byte-pair encoding as the papers tell it: cut by a regular expression, then always the best merge."""
    char_of = {byte: char for char, byte in _BYTE_OF_CHAR.items()}
    out: list[int] = []
    for piece in regex.findall(pieces, text):
        symbols = [char_of[byte] for byte in piece.encode()]
        if whole and "".join(symbols) in vocab:
            symbols = ["".join(symbols)]
        while True:
            ranked = [(merges[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in merges]
            if not ranked:
                break
            _, i = min(ranked)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        out += [vocab[symbol] for symbol in symbols]
    return out


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"


def rules(path: Path) -> tuple[dict[str, int], Merges]:
    meta = read_metadata(path)
    vocab = {text: i for i, text in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = {tuple(merge.split(" ")): i for i, merge in enumerate(meta["tokenizer.ggml.merges"])}
    return vocab, merges  # pyright: ignore[reportReturnType]


def write_gguf(path: Path, **fields: Any) -> Path:
    """A GGUF file without tensors."""
    writer = GGUFWriter(path, "llama")
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def tiny(tmp_path: Path, **fields: Any) -> Tokenizer:
    """The default model's vocabulary under other rules."""
    meta = read_metadata(resolve(""))
    own = {
        key: meta[f"tokenizer.ggml.{key}"]
        for key in ("model", "tokens", "merges", "token_type", "bos_token_id", "eos_token_id")
    }
    return load_tokenizer(write_gguf(tmp_path / "t.gguf", **(own | fields)))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_text_without_digits_tokenises_as_in_transformers(tokenizer: Tokenizer, oracle: Any, text: str):
    """Where transformers' reading of the GGUF file is the model's, ours equals it."""
    assert tokenizer.encode(text, add_special_tokens=True) == oracle(text)["input_ids"]


def test_all_text_tokenises_as_in_transformers_with_the_digit_rule(tokenizer: Tokenizer, oracle: Any):
    """With the model's digit rule put back into transformers, everything is equal, random text included."""
    backend = with_digit_rule(oracle)

    @settings(max_examples=150, deadline=None)
    @given(any_text)
    def check(text: str) -> None:
        assert ids(tokenizer, text) == backend.encode(text).ids

    for text in TEXTS + DIGITS:
        assert ids(tokenizer, text) == backend.encode(text).ids
    check()


@pytest.mark.parametrize(
    ("pre", "pieces", "whole"),
    [
        ("gpt-2", GPT2, False),
        ("default", GPT2, False),
        ("smollm", r"\p{N}|" + GPT2.replace(r" ?\p{N}+|", ""), False),
        ("llama-bpe", WORDS + r"|\p{N}{1,3}|" + TAIL, True),
        ("qwen2", WORDS + r"|\p{N}|" + TAIL, False),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_model_does(tmp_path: Path, pre: str, pieces: str, whole: bool):
    """Our BPE equals the one written out above, for every family."""
    tokenizer = tiny(tmp_path, pre=pre, add_bos_token=False)
    vocab, merges = rules(resolve(""))
    rng = random.Random(5)
    alphabet = [*"ab dT's\n\r\t1234.,é_(漢🙂", "hello", "  ", "I'll", "\n\n"]
    samples = ["".join(rng.choices(alphabet, k=25)) for _ in range(150)]
    if pre == "smollm":  # a digit ends the whitespace run before it: the run is then at a piece's end
        samples = [s for s in samples if not regex.search(r"\s\s\p{N}", s)]
    for text in samples + [t for t in TEXTS if "<|" not in t and "e\u0301" not in t]:
        assert ids(tokenizer, text) == naive_bpe(text, pieces, vocab, merges, whole), text


def test_bos_and_eos_surround_text_where_the_file_says_so(tmp_path: Path):
    """add_bos and add_eos apply to plain prompts and not to rendered chats."""
    tokenizer = tiny(tmp_path, pre="gpt-2", add_bos_token=True, add_eos_token=True)
    plain = ids(tokenizer, "hello")
    assert tokenizer.encode("hello", add_special_tokens=True) == [1, *plain, 2]
    assert tokenizer.encode("hello<|im_end|>", add_special_tokens=True) == [1, *plain, 2, 2]


def test_llama_bpe_adds_bos_unless_told_otherwise(tmp_path: Path):
    """Llama 3's files may leave add_bos_token out; it is on."""
    assert tiny(tmp_path, pre="llama-bpe").encode("a", add_special_tokens=True)[0] == 1
    assert tiny(tmp_path, pre="gpt-2").encode("a", add_special_tokens=True)[0] != 1


def test_end_tokens_and_specials_come_from_the_file(tokenizer: Tokenizer, tmp_path: Path):
    """eos, eot and eom all end a generation."""
    assert tokenizer.end_token_ids == (2,)
    assert tokenizer.template_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.vocab_size == 49152
    assert tiny(tmp_path, pre="gpt-2", eot_token_id=0, eom_token_id=2).end_token_ids == (2, 0)


def test_no_text_has_fewer_tokens_than_the_bound_says(tokenizer: Tokenizer):
    """What lets a hopelessly long prompt be refused before it is tokenised."""
    longest = tokenizer.max_token_bytes
    assert longest is not None
    for text in [" " * 5000, "=" * 5000, "<|issue_comment|>" * 50, *TEXTS]:
        assert len(text.encode()) <= longest * len(ids(tokenizer, text))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"model": "t5"}, "tokenizer type 't5'"),
        ({"merges": ["q zzzz"]}, "merges are damaged"),
        ({"merges": ["x"]}, "merges are damaged"),
    ],
)
def test_an_unknown_or_damaged_tokenizer_is_named(tmp_path: Path, fields: dict[str, Any], message: str):
    """The operator learns what is not supported."""
    with pytest.raises(ModelError, match=message):
        tiny(tmp_path, **fields)


def test_missing_metadata_is_named(tmp_path: Path):
    """A GGUF file without a tokenizer says so."""
    with pytest.raises(ModelError, match=r"lacks tokenizer\.ggml\.model"):
        load_tokenizer(write_gguf(tmp_path / "t.gguf", pre="gpt-2"))


def test_metadata_equals_what_the_gguf_package_reads(tmp_path: Path):
    """Every value type, and arrays of them."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    values: dict[str, tuple[Any, GGUFValueType]] = {
        "u8": (200, GGUFValueType.UINT8),
        "i8": (-3, GGUFValueType.INT8),
        "u16": (60000, GGUFValueType.UINT16),
        "i16": (-300, GGUFValueType.INT16),
        "u32": (2**32 - 1, GGUFValueType.UINT32),
        "i32": (-(2**31), GGUFValueType.INT32),
        "f32": (0.5, GGUFValueType.FLOAT32),
        "yes": (True, GGUFValueType.BOOL),
        "text": ("größe 漢", GGUFValueType.STRING),
        "u64": (2**63, GGUFValueType.UINT64),
        "i64": (-(2**62), GGUFValueType.INT64),
        "f64": (0.1, GGUFValueType.FLOAT64),
    }
    for key, (value, kind) in values.items():
        writer.add_key_value(key, value, kind)
    arrays: dict[str, Sequence[Any]] = {"ints": [1, -2, 3], "texts": ["a", "", "é"]}
    for key, value in arrays.items():
        writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    meta = read_metadata(tmp_path / "m.gguf")
    assert {key: meta[key] for key in values} == {key: value for key, (value, _) in values.items()}
    assert {key: meta[key] for key in arrays} == arrays


def test_damaged_files_are_refused(tmp_path: Path):
    """Cut off anywhere, or not GGUF at all: a ModelError, never anything else."""
    whole = write_gguf(tmp_path / "w.gguf", model="gpt2", tokens=["a", "b"], pre="gpt-2").read_bytes()
    file = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_metadata(file)
    for junk in (b"x" * 100, b"GGUF" + struct.pack("<IQQ", 9, 0, 1), b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60)):
        file.write_bytes(junk)
        with pytest.raises(ModelError):
            read_metadata(file)


# --- HF folders -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """The default model's tokenizer as a HF folder."""
    (tmp_path / "tokenizer.json").write_text(tokenizer.backend.to_str())
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folder_gives_the_same_tokens(tokenizer: Tokenizer, folder: Path):
    """tokenizer.json is read as it stands."""
    loaded = load_tokenizer(folder)
    for text in TEXTS + DIGITS:
        assert ids(loaded, text) == ids(tokenizer, text)
    assert loaded.template_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert loaded.chat_template == "old"


def test_end_tokens_come_from_the_generation_config_first(folder: Path):
    """generation_config.json, then config.json, then the tokenizer's own."""
    assert load_tokenizer(folder).end_token_ids == (2,)
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert load_tokenizer(folder).end_token_ids == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_tokenizer(folder).end_token_ids == (7, 8)


def test_the_template_file_wins_over_the_config(folder: Path):
    """chat_template.jinja is the newer place; a list of templates has one called default."""
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert load_tokenizer(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("new")
    assert load_tokenizer(folder).chat_template == "new"


@pytest.mark.parametrize("damage", ["missing", "junk", "config", "decoder"])
def test_a_damaged_folder_is_refused(folder: Path, damage: str):
    """A ModelError that names the file."""
    if damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "junk":
        (folder / "tokenizer.json").write_text("{")
    elif damage == "config":
        (folder / "tokenizer_config.json").write_text("[1]")
    else:
        text = json.loads((folder / "tokenizer.json").read_text())
        text["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ModelError, match=folder.name):
        load_tokenizer(folder)
