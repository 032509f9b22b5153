"""Machines as files: presets, round trips, sources and errors."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.machine import Collective, Curve, Device, Link, Machine, MachineError, Node, Tier

PRESETS = ("abci", "dgx-a100", "dgx-h100", "ethernet-cpu", "frontera", "lassen", "stampede2")


def numeric_fields(value, path=""):
    """Yield the dotted name of every number of a machine, tiers by their names."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if item != field.default and field.name not in ("sources", "description", "transport"):
                yield from numeric_fields(item, f"{path}.{field.name}" if path else field.name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from numeric_fields(item, f"{path}.{key}")
    elif isinstance(value, tuple) and value and isinstance(value[0], Tier):
        for tier in value:
            yield from numeric_fields(tier, f"{path}.{tier.name}")
    elif isinstance(value, (int, float)):
        yield path


def test_presets_are_the_published_machines():
    assert Machine.presets() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_of_a_preset_has_a_source_or_says_assumed(name):
    machine = Machine.load(name)
    fields = list(numeric_fields(machine))
    assert len(fields) > 10
    unsaid = [
        f
        for f in fields
        if not any(f == known or f.startswith(f"{known}.") for known in machine.sources)
        and "default" not in machine.sources
    ]
    assert unsaid == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_saving_and_loading(name, tmp_path):
    machine = Machine.load(name)
    machine.save(tmp_path / "copy.toml")
    assert Machine.load(tmp_path / "copy.toml") == machine


positive = st.floats(1e-9, 1e15, allow_nan=False)
tables = st.lists(st.tuples(positive, positive), max_size=5, unique_by=lambda p: p[0]).map(
    lambda points: tuple(sorted(points))
)
links = st.builds(Link, positive, positive, tables)
texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
tiers = st.builds(
    Tier,
    name=texts,
    span=st.just(0),
    point_to_point=links,
    exchange=st.none() | links,
    collectives=st.lists(st.builds(Collective, st.just("all_reduce"), st.integers(2, 9), links)).map(tuple),
    links=st.integers(1, 8),
    contention=st.none() | tables.filter(bool).map(Curve),
    overlap=st.floats(0, 1),
)
machines = st.builds(
    Machine,
    name=texts,
    device=st.builds(
        Device,
        name=texts,
        peak_flops=st.dictionaries(texts, positive, min_size=1, max_size=3),
        memory_bytes=positive,
        memory_bandwidth=positive,
        efficiency=st.dictionaries(texts, tables.filter(bool).map(Curve), max_size=2),
        host=st.booleans(),
    ),
    node=st.builds(Node, st.integers(1, 8), st.integers(1, 64)),
    tiers=st.tuples(tiers),
    sources=st.dictionaries(texts, texts, max_size=3),
)


@settings(max_examples=25, deadline=None)
@given(machine=machines)
def test_any_machine_survives_saving_and_loading(machine, tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "machine.toml"
    machine.save(path)
    assert Machine.load(path) == machine


def test_an_unknown_preset_names_those_that_exist():
    with pytest.raises(MachineError, match=r"'lasen' is no preset.*lassen"):
        Machine.load("lasen")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "memory_bytes = 16",
            "memroy_bytes = 16",
            r"'device.memroy_bytes': no such field; did you mean 'memory_b",
        ),
        ("devices = 4", "devices = 4.5", r"'node.devices': 4.5 found; a value of type int"),
        ('name = "Tesla', 'nam = "Tesla', r"'device.nam': no such field"),
        ("memory_bandwidth = 900e9", "", r"'device.memory_bandwidth': missing"),
        ("memory_bandwidth = 900e9", "memory_bandwidth = -1", r"'device.memory_bandwidth': -1.0 found"),
        ("span = 0", "span = 8", r"'tiers': the last tier does not reach all ranks"),
        ("overlap = 0.7", "overlap = 7", r"overlap.*a fraction of 0 to 1"),
        ("[node]", "[node", r"not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path, old, new, message):
    path = tmp_path / "wrong.toml"
    Machine.load("lassen").save(path)
    text = path.read_text().replace("16000000000.0", "16e9").replace("900000000000.0", "900e9")
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(MachineError, match=message):
        Machine.load(path)


def test_sources_speak_for_what_is_below_them_and_silence_is_assumed():
    machine = Machine.load("abci").replace(sources={"device.peak_flops": "a book", "tiers.node": "a page"})
    assert machine.source("device.peak_flops.float32") == "a book"
    assert machine.source("tiers.node.point_to_point.latency_seconds") == "a page"
    assert machine.assumed(["device.memory_bytes", "tiers.node.links"]) == ("device.memory_bytes",)
