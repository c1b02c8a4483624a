"""The memory part of `plan`: one table for every engine, and a reason where there is none."""

from __future__ import annotations

from orchestrator.cli import memory
from orchestrator.cli.documents import Memory, MemoryPart, Model

GIB = 1 << 30
NOTHING = MemoryPart(weights=0, kv_cache=0, compute=0, overhead=0, total=0)


def model(architecture: str | None, read: bool = True) -> Model:
    return Model(
        path="/m", id="m", architecture=architecture, name=None, parameters=None, quantisation=None,
        file_size=None, layers=None, vocabulary=None, native_context=None,
        chat_template=False if read else None,
    )  # fmt: skip


def test_a_model_that_is_not_here_yet_has_no_table_good() -> None:
    assert memory.rows(None, model(None, read=False)) == [
        ("memory", "can't be told before the model is on this machine")
    ]
    assert memory.rows(None, model(None)) == memory.rows(None, model("llama"))
    assert memory.rows(None, model("llama")) == [("memory", "can't be told since its files say too little")]


def test_one_place_one_row_and_what_would_fit_good() -> None:
    part = MemoryPart(weights=5 * GIB, kv_cache=2 * GIB, compute=GIB, overhead=GIB, total=9 * GIB)
    told = Memory(
        device=part, host=NOTHING, free_device=8 * GIB, free_host=32 * GIB, verdict="no", source="formula",
        advice=["context: 2048", "slots: 1"], notes=["a note"],
    )  # fmt: skip
    labels, lines = zip(*memory.rows(told, model("llama")), strict=True)
    assert labels[0] == "memory"
    assert set(labels[1:]) == {""}
    assert lines[0] == "it does not fit (by formula)"
    assert lines[2].split() == ["GPU", "5.0", "GiB", "2.0", "GiB", "1.0", "GiB", "1.0", "GiB", "9.0", "GiB",
                                "8.0", "GiB"]  # fmt: skip
    assert lines[3:] == ("would fit with context: 2048", "would fit with slots: 1", "a note")
