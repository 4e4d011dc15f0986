"""run: prompts from everywhere, answers on standard output, everything said about them on standard error."""

import json
import shutil

import pytest
from model_folders import save_model, sparse_plan
from tiny_models import tiny_model

from sparsekv.plans.files import load_plan, write_plan

KEYS = {
    "text",
    "prompt_tokens",
    "new_tokens",
    "prefill_seconds",
    "decode_seconds",
    "prefill_density",
    "decode_share",
    "kv_bytes_device",
    "kv_bytes_host",
    "kv_dtype",
    "tokens_drafted",
    "drafts_accepted",
}
PROMPT = "What is the number? " * 40
FEW = ("--max-new-tokens", 6)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def test_a_plan_committed_in_a_model_folder_is_found_and_run(sparsekv, folder):
    done = sparsekv("run", folder, "--prompt", PROMPT, "--offload", "always", "--json", *FEW)
    assert done.code == 0, done.err
    assert done.data.keys() == KEYS
    assert done.data["prompt_tokens"] == len(PROMPT)
    assert done.data["new_tokens"] == 6
    assert 0.1 < done.data["prefill_density"] < 1
    assert 0 < done.data["kv_bytes_host"] < done.data["kv_bytes_device"]  # one layer of three moved to the host


def test_keys_and_values_in_8_bits_take_a_quarter_of_float32(sparsekv, folder):
    call = ("run", folder, "--prompt", PROMPT, "--offload", "never", "--device", "cpu", "--dtype", "float32", *FEW)
    whole, stored = (sparsekv(*call, "--json", "--set", f"kv_dtype={dtype}").data for dtype in ("auto", "fp8"))
    assert (whole["kv_dtype"], stored["kv_dtype"]) == ("float32", "fp8")
    assert whole["kv_bytes_device"] == 4 * stored["kv_bytes_device"]
    assert "--set kv_dtype" in sparsekv("run", folder, "--prompt", "a", "--dense", "--set", "kv_dtype=fp8").err


def test_the_prompt_comes_from_an_option_a_file_or_standard_input(sparsekv, folder, tmp_path, stdin):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    expected = sparsekv("run", folder, "--prompt", PROMPT, *FEW).out
    assert sparsekv("run", folder, "--prompt-file", file, *FEW).out == expected
    stdin(PROMPT.encode())
    assert sparsekv("run", folder, *FEW).out == expected
    stdin(PROMPT.encode())
    assert sparsekv("run", folder, "--prompt-file", "-", *FEW).out == expected


@pytest.mark.parametrize(("end", "left"), [("", ""), ("\n", ""), ("\r\n", ""), ("\n\n", "\n"), (" ", " ")], ids=repr)
def test_one_newline_at_the_end_of_a_file_or_of_standard_input_is_no_part_of_the_prompt(tmp_path, stdin, end, left):
    from sparsekv.cli.run import given_prompt

    file = tmp_path / "prompt.txt"
    file.write_bytes(f"a\nb{end}".encode())
    stdin(file.read_bytes())
    assert given_prompt(None, file) == given_prompt(None, None) == f"a\nb{left}"
    assert given_prompt(f"a{end}", None) == f"a{end}"


def test_a_prompt_without_end_is_refused(sparsekv, copy, stdin):
    (copy / "model.safetensors").unlink()
    stdin(b"a" * ((64 << 20) + 1))
    for arguments, told in ((("--prompt-file", "/dev/zero"), "found a device"), ((), "at most 67,108,864 bytes")):
        done = sparsekv("run", copy, *arguments)
        assert (done.code, done.out) == (2, "")
        assert told in done.err


def test_a_backend_of_the_environment_that_cannot_run_is_told_apart_from_a_flag(sparsekv, folder, monkeypatch):
    call = ("run", folder, "--prompt", "a", "--device", "cpu", *FEW)
    assert "SPARSEKV_BACKEND" not in sparsekv(*call, "--set", "backend=flash").err
    monkeypatch.setenv("SPARSEKV_BACKEND", "flash")
    done = sparsekv(*call)
    assert done.code == 2
    assert "SPARSEKV_BACKEND" in done.err
    assert sparsekv(*call, "--set", "backend=cpu").code == 0


def test_compare_shows_both_and_where_they_part(sparsekv, folder):
    data = sparsekv("run", folder, "--prompt", PROMPT, "--compare", "--json", *FEW).data
    assert data.keys() >= KEYS
    assert data["dense"].keys() == KEYS
    assert data["dense"]["prefill_density"] == 1
    assert data["dense"]["kv_bytes_host"] == 0
    text = sparsekv("run", folder, "--prompt", PROMPT, "--compare", *FEW).out
    assert "speed-up" in text
    assert " 0 B" not in text


def test_compare_runs_a_beginning_both_ways_before_it_times_anything(tmp_path):
    from sparsekv.cli.answers import Session
    from sparsekv.runtime.hf.load import load_model

    model, seen = tiny_model(context=8192), []
    loaded = load_model(str(save_model(model, tmp_path / "tiny")))
    session = Session(loaded, sparse_plan(model), max_new_tokens=3, chat=False)

    def note(module, arguments):
        sparse = "sparsekv" in loaded.model.config._attn_implementation
        seen.append((arguments[0].shape[1], "sparse" if sparse else "dense"))

    with loaded.model.get_input_embeddings().register_forward_pre_hook(note):
        answers = session.dense_and_sparse("a" * 5000)
    beginning = 5000 - 2 * 2048
    prompts = [(count, way) for count, way in seen if count > 1]
    assert prompts == [(beginning, "dense"), (beginning, "sparse"), (5000, "dense"), (5000, "sparse")]
    assert [answer.generation.prompt_tokens for answer in answers] == [5000, 5000]


@pytest.mark.parametrize(
    ("device", "ends", "tokens", "length"),
    [
        ("cpu", (), 300, 300),
        ("cpu", (4096,), 8192, 2048),  # nothing is compiled there: any beginning will do
        ("cuda", (), 20_000, 20_000),  # all of it: cheap, and memory is taken as it will be
        ("cuda", (4096,), 131_072, 32_768),
        ("cuda", (4096, 65_536), 131_072, 67_584),  # in the bucket of the whole prompt
        ("cuda", (4096, 65_536), 131_075, 65_539),  # with its odd last tile
        ("cuda", (131_072,), 131_072, 32_768),
    ],
)
def test_the_beginning_that_compare_runs_first_does_what_the_whole_prompt_does(device, ends, tokens, length):
    from types import SimpleNamespace

    import torch

    from sparsekv.cli.answers import Session

    buckets = tuple(SimpleNamespace(up_to=end) for end in (*ends, None))
    plan = SimpleNamespace(buckets=buckets)
    loaded = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
    session = Session(loaded, plan)
    assert session.warm_up_length(tokens) == length


def test_dense_needs_no_plan_and_each_phase_can_be_switched_off(sparsekv, copy):
    moved = ("--prompt", PROMPT, "--offload", "always", "--json", *FEW)
    sparse, prefill_off, decode_off = (
        sparsekv("run", copy, *off, *moved).data
        for off in (
            (),
            ("--only", "decode"),
            ("--only", "prefill"),
        )
    )
    assert (prefill_off["prefill_density"], prefill_off["kv_bytes_host"]) == (1, sparse["kv_bytes_host"])
    assert (decode_off["prefill_density"], decode_off["kv_bytes_host"]) == (sparse["prefill_density"], 0)
    (copy / "sparsekv.yaml").unlink()
    dense = sparsekv("run", copy, "--prompt", PROMPT, "--dense", "--json", *FEW).data
    assert (dense["prefill_density"], dense["kv_bytes_host"]) == (1, 0)
    assert dense["kv_bytes_device"] > sparse["kv_bytes_device"]


def test_sparse_says_where_the_plan_is_executed(sparsekv, folder):
    call = ("run", folder, "--prompt", PROMPT, "--offload", "never", *FEW)
    never, always = (sparsekv(*call, "--json", "--sparse", word).data for word in ("never", "always"))
    assert (never["prefill_density"], never["decode_share"]) == (1, 1)
    assert always["prefill_density"] < 1 > always["decode_share"]
    rule = sparsekv(*call, "--json", "--sparse", "prefill=4kx1 decode=1x1").data
    assert (rule["prefill_density"], rule["decode_share"]) == (1, pytest.approx(always["decode_share"]))
    told = sparsekv(*call, "--sparse", "never").err
    assert "or skipping is slower here (--sparse always)" in " ".join(told.split())
    refused = sparsekv(*call, "--sparse", "sometimes")
    assert refused.code == 2
    assert "expected always, never, or thresholds" in refused.err


def test_exact_says_what_dense_attention_says_and_prefills_by_the_plan_where_asked(sparsekv, copy):
    asked = ("--prompt", PROMPT, "--json", "--max-new-tokens", 24)
    exact, decode_alone, by_plan, half = (
        sparsekv("run", copy, *flags, *asked).data
        for flags in (
            ("--exact", "all"),
            ("--exact", "decode"),
            (),
            ("--only", "prefill"),
        )
    )
    dense = sparsekv("run", copy, "--dense", *asked).data
    assert (exact["text"], exact["prefill_density"]) == (dense["text"], 1)
    assert (decode_alone["text"], decode_alone["prefill_density"]) == (half["text"], by_plan["prefill_density"])
    assert min(exact["tokens_drafted"], decode_alone["tokens_drafted"]) > 0 == by_plan["tokens_drafted"]


def test_sampling_repeats_with_its_seed(sparsekv, folder):
    def sampled(seed: int) -> str:
        return sparsekv(
            "run", folder, "--prompt", PROMPT, "--set", "temperature=1.5", "--set", f"seed={seed}", *FEW
        ).out

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_at_a_terminal_a_prompt_is_asked_for(sparsekv, folder, stdin):
    stdin(b"a\n", terminal=True)
    done = sparsekv("run", folder, *FEW)
    assert (done.code, "expected a prompt" in done.err) == (2, True)


def test_the_chat_template_is_applied_unless_raw(sparsekv, tmp_path):
    model = tiny_model(context=2048)
    chatty = save_model(model, tmp_path / "chatty", TEMPLATE)
    write_plan(sparse_plan(model), chatty / "sparsekv.yaml")
    raw = sparsekv("run", chatty, "--prompt", PROMPT, "--raw", "--json", *FEW).data
    applied = sparsekv("run", chatty, "--prompt", PROMPT, "--json", *FEW).data
    assert raw["prompt_tokens"] == len(PROMPT)
    assert applied["prompt_tokens"] == len(f"<user>{PROMPT}<assistant>")


def test_a_plan_of_another_architecture_exits_with_3_unless_allowed_where_its_layers_fit(sparsekv, folder, tmp_path):
    other = save_model(tiny_model(layers=4, context=2048), tmp_path / "other")
    call = ("run", other, "--plan", folder / "sparsekv.yaml", "--prompt", PROMPT, *FEW)
    done = sparsekv(*call)
    assert (done.code, done.out) == (3, "")
    assert "layers" in done.err
    assert "with --allow-mismatch." in done.err
    assert sparsekv(*call, "--allow-mismatch").code == 0


@pytest.mark.parametrize("edit", [{"hidden_act": "gelu"}, {"rms_norm_eps": 0.1}], ids=lambda edit: next(iter(edit)))
def test_a_plan_beside_an_edited_config_exits_with_3_unless_its_digest_is_of_the_version_before(
    sparsekv, folder, tmp_path, edit
):
    edited = shutil.copytree(folder, tmp_path / "edited")
    config = json.loads((edited / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps(config | edit))
    call = ("run", edited, "--prompt", PROMPT, *FEW)
    done = sparsekv(*call)
    assert (done.code, "the activation or the epsilon" in done.err) == (3, True)
    plan = load_plan(edited / "sparsekv.yaml")
    prints = plan.model.fingerprint
    before = prints.model_copy(update={"architecture": f"sha256:{prints.architecture.split(':')[2]:0<64}"})
    old = plan.model_copy(update={"model": plan.model.model_copy(update={"fingerprint": before})})
    write_plan(old, edited / "sparsekv.yaml")
    done = sparsekv(*call)
    assert (done.code, "warning" in done.err) == (0, False)
