"""Tasks in other formats: an answer follows from the context alone, and prompts come out as long as asked."""

import re
from collections.abc import Callable

import pytest
from reference_model.formats import FORMATS
from task_tokenizers import kit_named, tokenizer_named

from sparsekv.planner.tasks import DocumentRequest, Split, generator
from sparsekv.planner.tasks.documents import Draws


def one(pattern: str, text: str) -> str:
    """The only match of a pattern in whole lines."""
    (found,) = re.findall(f"^{pattern}$", text, re.MULTILINE)
    return str(found)


def of_dict(context: str, question: str) -> str:
    return one(re.escape(one(r">>> (.*)", question)) + r" = (\d{5})", context)


def of_function(context: str, question: str) -> str:
    return one("def " + re.escape(one(r"assert (.*) ==", question)) + r": return (\d{4})", context)


def of_table(context: str, question: str) -> str:
    return one(re.escape(question.splitlines()[1]) + r" (\d\d \| \d{3}) \|", context)


def of_quote(context: str, question: str) -> str:
    return one(re.escape(question.splitlines()[1]) + "((?: [a-z]+){10})", context)


def of_alias(context: str, question: str) -> str:
    names = [one(r"Resolve (\S+): \S+ ->", question)]
    while not names[-1].isdigit():
        names.append(one(rf"alias {re.escape(names[-1])} -> (\S+)", context))
    return " -> ".join(names[1:])


def of_list(context: str, question: str) -> str:
    return one(f"members of {one(r'The first member of (.*) is', question)}: ([a-z-]+), .*", context)


SOLVERS: dict[str, Callable[[str, str], str]] = {
    "dict_lookup": of_dict,
    "function_value": of_function,
    "table_row": of_table,
    "quote_line": of_quote,
    "alias_chain": of_alias,
    "first_of_list": of_list,
}


@pytest.mark.parametrize("tokenizer", ["shipped", "metaspace", "byte_level"])
@pytest.mark.parametrize("task", FORMATS)
def test_answers_follow_from_the_context(task: str, tokenizer: str) -> None:
    kit = kit_named(tokenizer)
    decode = tokenizer_named(tokenizer).decode
    draws = Draws(generator(Split.TRAINING, task, 1500, 0, 0))
    made = FORMATS[task].document(kit, DocumentRequest(1500, queries=3), draws)
    assert 1000 < len(made) <= 1500
    assert len(made.queries) >= 2
    for query in made.queries:
        assert SOLVERS[task](decode(made.context_ids), decode(query.question_ids)).strip() == query.answer.strip()
