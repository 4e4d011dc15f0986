"""What the requests to vLLM are asked for, and what is made of answers beside dense ones."""

from sparsekv.bench.vllm_requests import _beside


def test_answers_part_where_the_first_token_is_another() -> None:
    dense = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8], "c": [9]}
    found = {"a": [1, 2, 3, 4], "b": [5, 0, 7, 8], "d": [1]}
    assert _beside(found, dense) == {"beside": 2, "same": 1, "parting_per_1000": 200.0}
    assert _beside({"a": [1, 2]}, dense) == {"beside": 1, "same": 0, "parting_per_1000": 500.0}  # ends before
    assert _beside({}, dense) == {"beside": 0, "same": 0, "parting_per_1000": 0.0}
