"""The check of an adapter's files: what an engine could not serve, or would die of, is refused with the reason."""

import json
import os
from pathlib import Path

import pytest

from schemas.commands import AdapterVersion, Manifest
from schemas.errors import CheckpointError
from schemas.safetensors.format import TensorSpec, read_layout
from schemas.safetensors.manifest import CONFIG_BYTES_MAX, build_manifest, read_checkpoint
from tests.engines.adapters import BASE, save_adapter, save_base, tensors_of, write_tensors
from workers.engines.adapter_files import checked_adapter
from workers.engines.observed import LoRALimits, listed_adapters
from workers.engines.sglang.launch import read_launch as read_sglang

Q = "base_model.model.model.layers.0.self_attn.q_proj"
V = "base_model.model.model.layers.0.self_attn.v_proj"
Layout = dict[str, TensorSpec]
ANY = LoRALimits()
SGLANG = read_sglang({"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "o_proj"]}, {}).lora


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """The tensors of the base model."""
    return read_layout(save_base(tmp_path / "base"))


def version(manifest: Manifest | None = None, path: str = "a") -> AdapterVersion:
    return AdapterVersion(name="policy", version=7, path=path, manifest=manifest)


def refusal(
    root: Path, layout: Layout | None, limits: LoRALimits = ANY, manifest: Manifest | None = None, path: str = "a"
) -> str:
    """Why the adapter at a path is refused."""
    with pytest.raises(CheckpointError) as found:
        checked_adapter(root, version(manifest, path), layout, limits)
    assert "Nothing was" in str(found.value), found.value
    return str(found.value)


def test_an_adapter_that_fits_passes(tmp_path: Path, layout: Layout) -> None:
    directory = save_adapter(tmp_path / "a")
    manifest = build_manifest(directory, content=True)
    limits = LoRALimits(rank=4, modules=frozenset({"qkv_proj", "down_proj"}))
    assert checked_adapter(tmp_path, version(manifest), layout, limits) == directory


def test_names_may_lack_the_prefix_of_peft(tmp_path: Path, layout: Layout) -> None:
    tensors = {name.removeprefix("base_model.model."): shape for name, shape in tensors_of(BASE, 4).items()}
    save_adapter(tmp_path / "a", tensors=tensors)
    checked_adapter(tmp_path, version(), layout, ANY)
    save_adapter(tmp_path / "b", tensors={**tensors, **tensors_of({[*BASE][0]: (15, 8)}, 4)})
    assert "holds model.layers.0.self_attn.q_proj twice" in refusal(tmp_path, layout, path="b")


def test_some_modules_are_enough(tmp_path: Path, layout: Layout) -> None:
    save_adapter(tmp_path / "a", {name: BASE[name] for name in [*BASE][:1]})
    checked_adapter(tmp_path, version(), layout, ANY)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "IA3"}, "has peft_type 'IA3'"),
        ({"use_dora": True}, "has use_dora True"),
        ({"bias": "lora_only"}, "has bias lora_only"),
        ({"lora_bias": True}, "has lora_bias True"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save ['lm_head']"),
        ({"rank_pattern": {"q_proj": 8}}, "has rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "has alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "initialized by pissa_niter_4, which changes the base model"),
        ({"r": 0}, "has rank 0"),
        ({"r": True}, "has rank True"),
        ({"r": "4"}, "has rank '4'"),
        ({"lora_alpha": None}, "has lora_alpha None"),
        ({"r": 8}, "says r 8, and model.layers.0.mlp.down_proj has lora_A F32 [4, 12] and lora_B F32 [8, 4]"),
    ],
)
def test_settings_that_no_engine_serves_are_refused(
    settings: dict[str, object], says: str, tmp_path: Path, layout: Layout
) -> None:
    save_adapter(tmp_path / "a", settings=settings)
    assert says in refusal(tmp_path, layout)


def test_settings_that_are_off_are_none(tmp_path: Path, layout: Layout) -> None:
    off: dict[str, object] = {
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "bias": "none",
        "init_lora_weights": True,
    }
    save_adapter(tmp_path / "a", settings={**off, "layers_to_transform": None, "peft_version": "0.19.1"})
    checked_adapter(tmp_path, version(), layout, ANY)


def test_what_the_engine_was_launched_for_is_said(tmp_path: Path, layout: Layout) -> None:
    save_adapter(tmp_path / "a")
    assert "launched for 2 (--max-lora-rank)" in refusal(tmp_path, layout, LoRALimits(rank=2))
    few = LoRALimits(modules=frozenset({"q_proj"}))
    assert "changes model.layers.0.mlp.down_proj. Nothing was loaded. The engine was launched for q_proj" in refusal(
        tmp_path, layout, few
    )


def test_sglang_needs_more(tmp_path: Path, layout: Layout) -> None:
    assert SGLANG is not None
    attention = {name: BASE[name] for name in BASE if "attn" in name}
    save_adapter(tmp_path / "a", attention)
    checked_adapter(tmp_path, version(), layout, SGLANG)  # v_proj is fused with q_proj, for which it was launched
    save_adapter(tmp_path / "b", {name: BASE[name] for name in BASE if "q_proj" in name})
    assert "changes model.layers.0.self_attn.q_proj without v_proj" in refusal(tmp_path, layout, SGLANG, path="b")
    save_adapter(tmp_path / "c", attention, settings={"use_rslora": True})
    assert "has use_rslora True" in refusal(tmp_path, layout, SGLANG, path="c")
    save_adapter(tmp_path / "d", attention, settings={"target_modules": ".*_proj"})
    assert "needs a list of names" in refusal(tmp_path, layout, SGLANG, path="d")
    save_adapter(tmp_path / "e", attention, rank=16)
    assert "has rank 16. Nothing was loaded. The engine was launched for 8" in refusal(
        tmp_path, layout, SGLANG, path="e"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{V}.lora_B.weight": None}, "lacks lora_B of model.layers.0.self_attn.v_proj"),
        ({f"{V}.lora_A.weight": None}, "lacks lora_A of model.layers.0.self_attn.v_proj"),
        ({f"{Q}.lora_A.weight": (4, 9)}, "The model's own weight is F32 [16, 8]: lora_A must have 8 columns"),
        ({f"{Q}.lora_B.weight": (8, 4)}, "lora_B 16 rows"),
        ({f"{Q}.lora_B.weight": (16, 3)}, "says r 4, and"),
        ({f"{Q}.lora_A.weight": (4, 8, 1)}, "holds base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight as"),
        ({f"{Q}.lora_A.default.weight": (4, 8)}, "holds the tensor"),
        ({"model.embed_tokens.lora_embedding_A": (4, 8)}, "Names must be those of PEFT"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    change: dict[str, tuple[int, ...] | None], says: str, tmp_path: Path, layout: Layout
) -> None:
    tensors = {**tensors_of(BASE, 4), **{name: shape for name, shape in change.items() if shape is not None}}
    save_adapter(tmp_path / "a", tensors={name: tensors[name] for name in tensors if change.get(name, ()) is not None})
    assert says in refusal(tmp_path, layout)


def test_a_module_that_the_model_lacks_is_refused(tmp_path: Path, layout: Layout) -> None:
    save_adapter(tmp_path / "a", {**BASE, "model.layers.1.mlp.down_proj": (8, 12)})
    assert "changes model.layers.1.mlp.down_proj. Nothing was loaded. The engine's model has no such module" in refusal(
        tmp_path, layout
    )


def test_integers_are_no_adapter(tmp_path: Path, layout: Layout) -> None:
    write_tensors(save_adapter(tmp_path / "a") / "adapter_model.safetensors", tensors_of(BASE, 4), 0, dtype="I32")
    assert "Two dimensions of BF16, F16, F32 are served" in refusal(tmp_path, layout)


def test_a_model_whose_shapes_cannot_be_read_needs_a_manifest(tmp_path: Path, layout: Layout) -> None:
    manifest = build_manifest(save_adapter(tmp_path / "a"), content=False)
    assert "the shape of the base model can't be read here" in refusal(tmp_path, None)
    checked_adapter(tmp_path, version(manifest), None, ANY)
    packed = {**layout, "model.layers.0.mlp.down_proj.qweight": TensorSpec("I32", (12, 1))}
    del packed["model.layers.0.mlp.down_proj.weight"]
    assert "the shape of model.layers.0.mlp.down_proj can't be read here" in refusal(tmp_path, packed)
    checked_adapter(tmp_path, version(manifest), packed, ANY)


def test_a_manifest_is_compared(tmp_path: Path, layout: Layout) -> None:
    manifest = build_manifest(save_adapter(tmp_path / "a"), content=True)
    save_adapter(tmp_path / "a", seed=1)
    assert "has the right tensors with other values" in refusal(tmp_path, layout, manifest=manifest)
    save_adapter(tmp_path / "a", rank=2)
    assert ", the trainer's manifest has" in refusal(tmp_path, layout, manifest=manifest)


def test_the_configuration_is_compared(tmp_path: Path, layout: Layout) -> None:
    directory = save_adapter(tmp_path / "a")
    files = read_checkpoint(directory, adapter=True)
    synced = AdapterVersion(name="policy", version=7, path="a", manifest=files.manifest, config=files.config)
    checked_adapter(tmp_path, synced, layout, ANY)
    save_adapter(directory, settings={"lora_alpha": 16})  # no tensor shows it
    with pytest.raises(CheckpointError, match="another adapter_config.json than the trainer's sync"):
        checked_adapter(tmp_path, synced, layout, ANY)


def test_files_that_are_not_whole_are_refused(tmp_path: Path, layout: Layout) -> None:
    weights = save_adapter(tmp_path / "a") / "adapter_model.safetensors"
    config = weights.with_name("adapter_config.json")
    whole, settings = weights.read_bytes(), config.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "cut off" in refusal(tmp_path, layout)
    weights.rename(tmp_path / "a" / "adapter_model.bin")
    assert "pickled" in refusal(tmp_path, layout)
    weights.write_bytes(whole)
    (tmp_path / "a" / "extra.safetensors").write_bytes(whole)
    assert "must be its only safetensors file" in refusal(tmp_path, layout)  # SGLang reads them all
    (tmp_path / "a" / "extra.safetensors").unlink()
    for bad in (settings[:-1], b"[]", b"\xff", b"[" * 100_000):
        config.write_bytes(bad)
        assert "has an unreadable adapter_config.json" in refusal(tmp_path, layout)
    config.write_bytes(b" " * (CONFIG_BYTES_MAX + 1))
    assert "has more than 1,048,576 bytes" in refusal(tmp_path, layout)
    config.unlink()
    assert "adapter_config.json can't be read: No such file" in refusal(tmp_path, layout)
    os.mkfifo(config)
    assert "is not a regular file" in refusal(tmp_path, layout)
    assert "does not exist" in refusal(tmp_path, layout, path="none")


def test_a_path_that_can_lead_elsewhere_later_is_refused(tmp_path: Path, layout: Layout) -> None:
    save_adapter(tmp_path / "a")
    (tmp_path / "latest").symlink_to("a")
    assert f"leads to {tmp_path / 'a'}" in refusal(tmp_path, layout, path="latest")
    for path in ("./a", "a/", "a/.", "b//a"):
        assert "give the path without links" in refusal(tmp_path, layout, path=path)
    for path in ("../a", "/a", ""):
        assert "path refused" in refusal(tmp_path, layout, path=path)
    (tmp_path / "root").symlink_to(tmp_path)  # where the root is, is the agent's own affair
    checked_adapter(tmp_path / "root", version(), layout, ANY)


def test_listed_adapters_are_relative_to_the_root_and_bases_are_none(tmp_path: Path) -> None:
    cards = [
        {"id": "/m", "root": "/m", "parent": None},
        {"id": "policy-v7", "root": f"{tmp_path}/a/b", "parent": "/m"},
        {"id": "other", "root": "/elsewhere/x", "parent": "/m"},
        {"id": "resolved", "parent": "/m"},
        {"id": "x" * 201, "root": "/x", "parent": "/m"},
        {"id": 7, "root": [], "parent": {}},
        "what",
    ]
    expected = {"policy-v7": "a/b", "other": "/elsewhere/x", "resolved": ""}
    assert listed_adapters(json.loads(json.dumps(cards)), tmp_path) == expected
    assert listed_adapters(cards, None)["policy-v7"] == f"{tmp_path}/a/b"
    assert listed_adapters({"what": 1}, tmp_path) == listed_adapters(None, tmp_path) == {}
