"""Calls that cannot work: a table a command of what is typed and what the message names; exit code 2."""

import pytest

RUN = (
    (("--prompt", "  "), "blanks"),
    (("--prompt-file", "/nowhere/prompt"), "found none"),
    (("--prompt", "a", "--prompt-file", "b"), "both"),
    (("--prompt", "a", "--dense", "--compare"), "both"),
    (("--prompt", "a" * 2048), "2048"),
    (("--prompt", "a\udcff"), "UTF-8"),  # as an argument that is no text reaches us
    (("--prompt", "a", "--prefill-chunk", "1"), "--prefill-chunk"),
    (("--prompt", "a", "--max-new-tokens", "9" * 5000), "--max-new-tokens"),
    (("--prompt", "a", "--offload", "9" * 5000), "--offload"),
    (("--prompt", "a", "--offload", "7"), "layers"),
    (("--prompt", "a", "--set", "temperature=1e-300"), "temperature of 0"),
    (("--prompt", "a", "--set", "temperature=inf"), "--set temperature"),
    (("--prompt", "a", "--set", "top_p=nan"), "--set top_p"),
    (("--prompt", "a", "--set", "seed=" + "9" * 30), "--set seed"),
    (("--prompt", "a", "--set", "temperature=nan"), "--set temperature"),
    (("--prompt", "a", "--device", "quantum"), "device"),
    (("--prompt", "a", "--device", "meta"), "device"),
    (("--prompt", "a", "--device", ""), "device"),
    (("--prompt", "a", "--dtype", "int3"), "dtype"),
    (("--prompt", "a", "--set", "backend=flash"), "flash"),
    (("--prompt", "a", "--set", "backend=abacus"), "abacus"),
    (("--prompt", "a", "--exact", "all", "--only", "prefill"), "--exact"),
    (("--prompt", "a", "--exact", "decode", "--dense"), "--exact"),
    (("--prompt", "a", "--exact", "prefill"), "--exact"),
)
EVAL = (
    (("--length", "4k"), "2k"),
    (("--length", "1k,2k"), "one --length"),
    (("--length", "soon"), "--length"),
    (("--set", "tasks=juggling", "--length", "1k"), "juggling"),
    (("--only", "third"), "third"),
    (("--samples", "9" * 30), "--samples"),
    (("--prefill-chunk", "1"), "--prefill-chunk"),
    (("--suite", "longbench"), ("--suite", "'ruler'", "longbench")),
    (("--suite", "ruler", "--set", "tasks=vt"), ("--set tasks", "--suite ruler", "found both")),
    (("--suite", "ruler", "--length", "64k"), ("context of 2k", "64k")),
    (("--suite", "ruler", "--length", "96"), ("niah_single_1 of --suite ruler at 96", "longer length")),
    (("--suite", "ruler", "--length", "1k", "--beside", "plan=a.yaml"), ("--beside NAME=FILE", "plan=a.yaml")),
    (("--suite", "ruler", "--length", "1k", "--beside", "other"), ("--beside NAME=FILE", "'other'")),
    (("--set", "tasks=qa_1"), ("corpus of questions", "lm-evaluation-harness")),
    (("--set", "tasks=vt,qa_2"), ("found 'qa_2'", "lm-evaluation-harness")),
    (("--set", "tasks=niah_single_2"), ("niah_single_2", "--suite ruler")),
    (("-o", "a.json"), ("no --out", "--suite")),
    (("--beside", "a=b.yaml"), ("no --beside", "--suite")),
)
DOCTOR = (
    (("--memory", "FOLDER", "soon"), "--memory: expected a length"),
    (("--memory", "FOLDER", "1k,2k"), "'1k,2k'"),
    (("--memory", "FOLDER", "1k", "--device-memory", "much"), "--device-memory: expected an amount"),
    (("--memory", "FOLDER", "1k", "--host-memory", "0GiB"), "--host-memory: expected an amount"),
    (("--memory", "FOLDER", "1k", "--device", "cpu", "--device-memory", "1GiB"), "found cpu"),
    (("--memory", "FOLDER", "1k", "--offload", "allways"), "did you mean always"),
    (("--memory", "/nowhere/model", "1k"), "/nowhere/model"),
    (("--memory", "FOLDER", "1k", "--set", "batch=0"), "--set batch"),
    (("FOLDER", "--memory", "FOLDER", "1k"), "found both"),
)
WITHOUT_PLAN = (
    (("--length", "1k", "--only", "prefill"), "--only"),
    (("--length", "1k", "--set", "backend=cpu"), "--set"),
)
TABLES = ((("run", "FOLDER"), RUN), (("eval", "FOLDER"), EVAL), (("eval", "BARE"), WITHOUT_PLAN), (("doctor",), DOCTOR))


@pytest.mark.parametrize(
    ("call", "words"), [((*command, *typed), words) for command, table in TABLES for typed, words in table]
)
def test_what_cannot_be_meant_is_one_usage_error_that_names_it(sparsekv, folder, model, call, words):
    done = sparsekv(*({"FOLDER": folder, "BARE": model}.get(part, part) for part in call))
    assert (done.code, done.out) == (2, "")
    assert [word for word in ((words,) if isinstance(words, str) else words) if word not in done.err] == []
    assert "Traceback" not in done.err
