"""Models of the hub: chosen, fetched, resumed, verified and found again, by the real ``huggingface_hub``."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import model_hub, model_hub_fetch
from orchestrator import model_hub_choice as choice
from orchestrator.errors import ModelError, NotAModel, NotFetched, UnsupportedModel
from orchestrator.model_hub_choice import File, Listing
from orchestrator.profile import ModelSpec, Profile
from tests import hf_models
from tests.fakes.hub import Hub, Repo, served
from tests.gguf_files import gguf_bytes

REPO = "owner/model-GGUF"
MODEL = "model-Q4_K_M.gguf"
CONTENT = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def hub() -> Iterator[Hub]:
    from huggingface_hub import close_session

    with served() as hub:
        hub.repos[REPO] = Repo({MODEL: CONTENT, "model-Q8_0.gguf": CONTENT * 2, "README.md": b"read me"})
        yield hub
        close_session()


@pytest.fixture
def environ(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(model_hub_fetch, "_PAUSE", 0)
    return {
        "HOME": str(tmp_path),
        "HF_ENDPOINT": hub.urls["hub"],
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "XDG_CACHE_HOME": str(tmp_path / "ours"),
    }


def missing(text: str, environ: dict[str, str], find: Any = model_hub.gguf) -> NotFetched:
    with pytest.raises(NotFetched) as caught:
        find(text, environ)
    return caught.value


def fetched(text: str, environ: dict[str, str], find: Any = model_hub.gguf, progress: Any = None) -> Path:
    missing(text, environ, find).download.fetch(progress)
    return find(text, environ)


def partials(environ: dict[str, str]) -> list[Path]:
    return list(Path(environ["HF_HUB_CACHE"]).rglob("*.incomplete"))


class Stop(Exception):
    """What somebody who has heard enough raises."""


# -- which files ---------------------------------------------------------------------------------------


def listing(*paths: str) -> Listing:
    return Listing(
        "o/r", "c" * 40, tuple(File(path, number + 1, "d" * 64) for number, path in enumerate(paths))
    )


def names(files: tuple[File, ...]) -> list[str]:
    return [file.path for file in files]


@pytest.mark.parametrize(
    ("paths", "wanted", "chosen"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf"], None, ["m-Q4_K_M.gguf"]),
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf"], "q8_0", ["m-Q8_0.gguf"]),
        (["m-F16.gguf", "m-Q8_0.gguf"], None, ["m-Q8_0.gguf"]),
        (["m.Q4_0.gguf", "m.Q4_K_S.gguf", "m.IQ4_XS.gguf"], None, ["m.Q4_K_S.gguf"]),
        (["m-Q2_K.gguf", "m-Q3_K_L.gguf"], None, ["m-Q3_K_L.gguf"]),
        (["m-UD-Q4_K_XL.gguf", "m-UD-IQ2_M.gguf"], "Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        (["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "Q4_K_M", ["m-Q4_K_M.gguf"]),
        (["model.gguf"], None, ["model.gguf"]),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "b-Q4_K_M.gguf", ["b-Q4_K_M.gguf"]),
        (["mmproj-F16.gguf", "m.imatrix.gguf", "m-F16.gguf"], None, ["m-F16.gguf"]),
        (["BF16/m-00001-of-00002.gguf", "BF16/m-00002-of-00002.gguf"], "bf16",
         ["BF16/m-00001-of-00002.gguf", "BF16/m-00002-of-00002.gguf"]),
        (["m-Q6_K-00002-of-00002.gguf", "m-Q6_K-00001-of-00002.gguf", "m-F32.gguf"], None,
         ["m-Q6_K-00001-of-00002.gguf", "m-Q6_K-00002-of-00002.gguf"]),
    ],
)  # fmt: skip
def test_the_file_or_its_shards_are_chosen_by_quantisation_good(paths, wanted, chosen) -> None:
    assert names(choice.gguf(listing(*paths), wanted)) == chosen


def test_a_quantisation_that_is_not_there_names_those_that_are_bad() -> None:
    with pytest.raises(UnsupportedModel, match=r"hf:o/r holds no Q5_K_M") as caught:
        choice.gguf(listing("m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf"), "Q5_K_M")
    assert caught.value.advice == "it holds Q4_K_M, Q8_0"


def test_two_models_of_one_quantisation_must_be_told_apart_bad() -> None:
    with pytest.raises(UnsupportedModel, match=r"may be any of a-Q4_0.gguf, b-Q4_0.gguf") as caught:
        choice.gguf(listing("a-Q4_0.gguf", "b-Q4_0.gguf"), None)
    assert caught.value.advice == "name the file: hf:o/r:a-Q4_0.gguf"


def test_a_repository_that_lacks_a_shard_is_refused_bad() -> None:
    with pytest.raises(NotAModel, match="1 of the 2 shards"):
        choice.gguf(listing("m-Q4_0-00002-of-00002.gguf"), None)


def test_a_repository_without_the_form_says_where_it_may_be_bad() -> None:
    with pytest.raises(UnsupportedModel, match="holds no GGUF"):
        choice.gguf(listing("model.safetensors"), None)
    with pytest.raises(UnsupportedModel, match="holds no safetensors"):
        choice.snapshot(listing("m-Q4_0.gguf", "config.json"))
    with pytest.raises(UnsupportedModel, match="holds no projector"):
        choice.projector(listing("m-Q4_0.gguf"), None)


def test_a_projector_is_chosen_for_itself_good() -> None:
    files = listing("m-Q4_0.gguf", "mmproj-F32.gguf", "mmproj-m-f16.gguf")
    assert names(choice.projector(files, None)) == ["mmproj-m-f16.gguf"]
    assert names(choice.projector(files, "F32")) == ["mmproj-F32.gguf"]


def test_a_snapshot_is_what_is_needed_and_the_weights_come_last_good() -> None:
    files = listing(
        "README.md", "config.json", "consolidated.safetensors", "model-00001-of-00001.safetensors",
        "model.safetensors.index.json", "onnx/model.onnx", "original/config.json", "pytorch_model.bin",
        "tokenizer.json", "vocab.txt",
    )  # fmt: skip
    assert names(choice.snapshot(files)) == [
        "config.json", "model.safetensors.index.json", "tokenizer.json", "vocab.txt",
        "model-00001-of-00001.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["hf:", "hf:name", "hf:a/b/c", "hf:a/b:", "hf:../b", "hf:a/b:Q4 0", "hf:a--b/c", "hf:a/b\n"]
)
def test_what_is_no_name_on_the_hub_is_refused_bad(text: str) -> None:
    with pytest.raises(ModelError, match="is not hf:OWNER/REPO"):
        model_hub.Reference.parse(text)


# -- getting them --------------------------------------------------------------------------------------


def test_what_is_missing_is_told_and_not_fetched_good(hub: Hub, environ: dict[str, str]) -> None:
    fault = missing(f"hf:{REPO}", environ)
    assert fault.message == f"model: hf:{REPO} is not here: 1 file, 1.0 MiB would be downloaded"
    assert not hub.contents()
    assert not Path(environ["HF_HUB_CACHE"]).exists()


def test_a_model_is_fetched_once_and_shared_with_other_tools_good(hub: Hub, environ: dict[str, str]) -> None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    seen: list[tuple[int, int]] = []
    path = fetched(f"hf:{REPO}", environ, progress=lambda *both: seen.append(both))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert not partials(environ)
    asked = len(hub.requests)
    assert model_hub.gguf(f"hf:{REPO}", environ) == path
    assert len(hub.requests) == asked, "what is here needs no question"
    cache = environ["HF_HUB_CACHE"]
    assert try_to_load_from_cache(REPO, MODEL, cache_dir=cache) == str(path)
    again = hf_hub_download(REPO, MODEL, cache_dir=cache, endpoint=hub.urls["hub"])
    assert again == str(path)
    assert len(hub.contents()) == 1


def test_what_another_tool_has_fetched_is_not_fetched_again_good(hub: Hub, environ: dict[str, str]) -> None:
    from huggingface_hub import hf_hub_download

    theirs = hf_hub_download(REPO, MODEL, cache_dir=environ["HF_HUB_CACHE"], endpoint=hub.urls["hub"])
    assert model_hub.gguf(f"hf:{REPO}", environ) == Path(theirs)
    hub.status = 503
    Path(environ["XDG_CACHE_HOME"], "orchestrator", "hub", "models--owner--model-GGUF.json").unlink()
    assert model_hub.gguf(f"hf:{REPO}:Q4_K_M", environ) == Path(theirs), "without the hub too"


def test_a_cut_connection_is_taken_up_where_it_broke_good(hub: Hub, environ: dict[str, str]) -> None:
    hub.cuts = [300_000, 200_000, 0]
    assert fetched(f"hf:{REPO}", environ).read_bytes() == CONTENT
    assert [each.range for each in hub.contents()] == [
        "bytes=0-", "bytes=300000-", "bytes=500000-", "bytes=500000-",
    ]  # fmt: skip


def test_an_interrupted_download_goes_on_in_the_next_process_good(hub: Hub, environ: dict[str, str]) -> None:
    def enough(done: int, _total: int) -> None:
        if done >= 400_000:
            raise Stop

    download = missing(f"hf:{REPO}", environ).download
    with pytest.raises(Stop):
        download.fetch(enough)
    (partial,) = partials(environ)
    kept = partial.stat().st_size
    assert 400_000 <= kept < len(CONTENT)
    fault = missing(f"hf:{REPO}", environ)
    assert fault.download.size == len(CONTENT) - kept, "what is told is what still has to come"
    fault.download.fetch()
    assert hub.contents()[-1].range == f"bytes={kept}-"
    assert model_hub.gguf(f"hf:{REPO}", environ).read_bytes() == CONTENT


def test_a_connection_that_never_brings_anything_is_given_up_bad(hub: Hub, environ: dict[str, str]) -> None:
    hub.cuts = [0] * 99
    with pytest.raises(ModelError, match="can't be reached") as caught:
        fetched(f"hf:{REPO}", environ)
    assert "goes on where it stopped" in (caught.value.advice or "")
    assert len(hub.contents()) == 5


def test_a_hub_that_gives_no_parts_starts_anew_ugly(hub: Hub, environ: dict[str, str]) -> None:
    hub.ranges, hub.cuts = False, [300_000]
    assert fetched(f"hf:{REPO}", environ).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_behind_bad(hub: Hub, environ: dict[str, str]) -> None:
    hub.damaged.add(MODEL)
    with pytest.raises(ModelError, match=r"model-Q4_K_M.gguf arrived with the checksum \w{64}, should be"):
        fetched(f"hf:{REPO}", environ)
    assert not partials(environ)
    missing(f"hf:{REPO}", environ)
    hub.damaged.clear()
    assert fetched(f"hf:{REPO}", environ).read_bytes() == CONTENT


@pytest.mark.parametrize("left", [b"\0" * 1000, b"\0" * len(CONTENT), b"\0" * (len(CONTENT) + 1)])
def test_a_damaged_beginning_is_fetched_anew_ugly(left: bytes, hub: Hub, environ: dict[str, str]) -> None:
    download = missing(f"hf:{REPO}", environ).download
    partial = download.hub.store(REPO).partial(download.files[0])
    partial.parent.mkdir(parents=True)
    partial.write_bytes(left)
    download.fetch()
    assert model_hub.gguf(f"hf:{REPO}", environ).read_bytes() == CONTENT


def test_two_at_once_fetch_it_once_good(hub: Hub, environ: dict[str, str]) -> None:
    hub.hold = threading.Event()
    second_waits = threading.Event()
    download = missing(f"hf:{REPO}", environ).download

    def wait(_done: int, _total: int) -> None:
        if threading.current_thread().name == "second":
            second_waits.set()

    threads = [
        threading.Thread(target=download.fetch, args=(wait,), name=name) for name in ("first", "second")
    ]
    threads[0].start()
    assert hub.holding.wait(60)
    threads[1].start()
    assert second_waits.wait(60)
    hub.hold.set()
    for thread in threads:
        thread.join(60)
    assert model_hub.gguf(f"hf:{REPO}", environ).read_bytes() == CONTENT
    assert len(hub.contents()) == 1


def test_shards_and_a_projector_are_fetched_whole_good(hub: Hub, environ: dict[str, str]) -> None:
    shards = {f"big/m-Q8_0-0000{number}-of-00002.gguf": CONTENT[:number] for number in (1, 2)}
    hub.repos["o/r"] = Repo({**shards, "mmproj-F16.gguf": b"projector"})
    path = fetched("hf:o/r", environ)
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    assert [each.read_bytes() for each in sorted(path.parent.iterdir())] == list(shards.values())
    assert fetched("hf:o/r", environ, model_hub.projector).read_bytes() == b"projector"


def test_a_snapshot_is_a_folder_that_other_tools_find_good(hub: Hub, environ: dict[str, str]) -> None:
    files = {"config.json": b"{}", "model.safetensors": CONTENT, "onnx/model.onnx": b"x", "a.md": b"y"}
    hub.repos["o/r"] = Repo(files)
    assert missing("hf:o/r", environ, model_hub.snapshot).path.name == "c" * 40
    folder = fetched("hf:o/r", environ, model_hub.snapshot)
    assert {each.name for each in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder.parent.parent / "refs" / "main").read_text() == "c" * 40
    with pytest.raises(UnsupportedModel, match="chooses among GGUF files"):
        model_hub.snapshot("hf:o/r:Q4_0", environ)


def test_vllm_reads_the_snapshot_good(hub: Hub, environ: dict[str, str], tmp_path: Path) -> None:
    from backends.vllm import VllmCpu

    made = hf_models.tiny(tmp_path / "made")
    hf_models.weights(made / "model.safetensors", {"a": ("BF16", [4], 8)})
    hub.repos["o/r"] = Repo({path.name: path.read_bytes() for path in made.iterdir()})
    profile = Profile(name="m", model=ModelSpec(hf="hf:o/r"), backend="vllm-cpu", directory=tmp_path)
    engine = VllmCpu(profile, environ=environ)
    missing("", environ, lambda _text, environ: engine.find_model(profile, environ)).download.fetch()
    folder, model = engine.find_model(profile, environ)
    assert (folder.name, model.layers, model.parameters) == ("c" * 40, 2, 4)


def test_a_newer_model_is_fetched_when_asked_for_good(hub: Hub, environ: dict[str, str]) -> None:
    old = fetched(f"hf:{REPO}", environ)
    hub.repos[REPO] = Repo({MODEL: b"newer"}, commit="d" * 40)
    assert model_hub.gguf(f"hf:{REPO}", environ) == old
    model_hub.refresh(f"hf:{REPO}", environ)
    assert fetched(f"hf:{REPO}", environ).read_bytes() == b"newer"


def test_what_is_too_large_for_plain_http_is_left_to_the_library_good(
    hub: Hub, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_hub_fetch, "LARGEST", 0)
    seen: list[int] = []
    path = fetched(f"hf:{REPO}", environ, progress=lambda done, _total: seen.append(done))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == len(CONTENT)
    assert capfd.readouterr() == ("", "")


# -- what goes wrong -----------------------------------------------------------------------------------


def test_a_token_goes_to_the_hub_and_nowhere_else_good(hub: Hub, environ: dict[str, str]) -> None:
    hub.repos[REPO].private = True
    environ["HF_TOKEN"] = hub.token
    download = missing(f"hf:{REPO}", environ).download
    download.fetch()
    assert hub.contents()
    assert not [each for each in hub.contents() if "authorization" in each.headers]
    assert hub.token not in repr(download)


@pytest.mark.parametrize("token", [None, "hf_of_somebody_else"])
def test_a_gated_model_says_how_to_get_in_bad(
    token: str | None, hub: Hub, environ: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    hub.repos[REPO].gated = True
    environ |= {"HF_TOKEN": token} if token else {}
    with pytest.raises(ModelError, match="accepted its licence") as caught:
        fetched(f"hf:{REPO}", environ)
    assert caught.value.advice == (
        f"accept it at {hub.urls['hub']}/{REPO}, and set HF_TOKEN to a token of that account"
    )
    told = f"{caught.value}{caught.value.__cause__}{capfd.readouterr()}"
    assert "hf_of_somebody_else" not in told
    environ["HF_TOKEN"] = hub.token
    assert fetched(f"hf:{REPO}", environ).read_bytes() == CONTENT


def test_a_repository_that_is_not_there_is_named_bad(hub: Hub, environ: dict[str, str]) -> None:
    with pytest.raises(ModelError, match=r"hf:no/body: there is no such repository at http") as caught:
        model_hub.gguf("hf:no/body", environ)
    assert "HF_TOKEN" in (caught.value.advice or "")


def test_offline_mode_asks_nobody_bad(hub: Hub, environ: dict[str, str]) -> None:
    environ["HF_HUB_OFFLINE"] = "1"
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE keeps from asking"):
        model_hub.gguf(f"hf:{REPO}", environ)
    assert not hub.requests
    del environ["HF_HUB_OFFLINE"]
    path = fetched(f"hf:{REPO}", environ)
    assert model_hub.gguf(f"hf:{REPO}", environ | {"HF_HUB_OFFLINE": "1"}) == path


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "not a url"])
def test_a_hub_that_can_not_be_reached_is_told_bad(endpoint: str, environ: dict[str, str]) -> None:
    environ["HF_ENDPOINT"] = endpoint
    with pytest.raises(ModelError, match="can't be reached") as caught:
        model_hub.gguf(f"hf:{REPO}", environ)
    assert "HF_ENDPOINT" in (caught.value.advice or "")


def test_a_token_that_is_not_valid_is_told_bad(hub: Hub, environ: dict[str, str]) -> None:
    hub.status = 401
    with pytest.raises(ModelError, match=r"refuses access \(401\)") as caught:
        model_hub.gguf(f"hf:{REPO}", environ)
    assert "check HF_TOKEN" in (caught.value.advice or "")


def test_a_hub_in_trouble_is_told_with_its_status_bad(hub: Hub, environ: dict[str, str]) -> None:
    hub.status = 500
    with pytest.raises(ModelError, match="answers with status 500"):
        model_hub.gguf(f"hf:{REPO}", environ)


def test_too_little_space_is_told_before_anything_is_fetched_bad(hub: Hub, environ: dict[str, str]) -> None:
    hub.repos[REPO].sizes[MODEL] = 1 << 60
    with pytest.raises(ModelError, match=r"needs \d+ MiB in .*, \d+ MiB are free"):
        missing(f"hf:{REPO}", environ).download.fetch()
    assert not hub.contents()


def test_a_cache_that_can_not_be_written_is_told_bad(
    hub: Hub, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    environ["HF_HUB_CACHE"] = str(tmp_path / "file" / "cache")
    with pytest.raises(ModelError, match="can't be used: not a directory"):
        fetched(f"hf:{REPO}", environ)


@pytest.mark.parametrize("path", ["../../../evil.gguf", "/etc/evil.gguf", "a//b.gguf", "a/../b.gguf"])
def test_a_hub_whose_names_lead_elsewhere_is_refused_ugly(
    path: str, hub: Hub, environ: dict[str, str]
) -> None:
    hub.repos[REPO].files[path] = b"evil"
    with pytest.raises(ModelError, match="does not tell its files' names, sizes and checksums"):
        model_hub.gguf(f"hf:{REPO}", environ)


def test_a_list_that_was_damaged_is_asked_for_anew_ugly(hub: Hub, environ: dict[str, str]) -> None:
    path = fetched(f"hf:{REPO}", environ)
    (kept,) = Path(environ["XDG_CACHE_HOME"]).rglob("*.json")
    for text in ("", "[]", '{"commit": "../..", "files": [], "endpoint": ""}'):
        kept.write_text(text)
        assert model_hub.gguf(f"hf:{REPO}", environ) == path


def test_a_blob_that_somebody_removed_is_fetched_again_ugly(hub: Hub, environ: dict[str, str]) -> None:
    path = fetched(f"hf:{REPO}", environ)
    path.resolve().unlink()
    assert fetched(f"hf:{REPO}", environ).read_bytes() == CONTENT


def test_the_library_is_imported_only_by_who_asks_the_hub_good(hub: Hub, environ: dict[str, str]) -> None:
    hub.repos[REPO].files[MODEL] = gguf_bytes()
    fetched(f"hf:{REPO}", environ)
    script = (
        "import sys, types, orchestrator.profile\n"
        "from pathlib import Path\n"
        "from orchestrator import model_files, model_hub\n"
        f"spec = types.SimpleNamespace(package=None, gguf=None, hf='hf:{REPO}', mmproj=None, lora=())\n"
        f"print(model_files.resolve(spec, directory=Path('.'), environ={environ!r}))\n"
        "assert not {'huggingface_hub', 'httpx2', 'filelock'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(MODEL)
