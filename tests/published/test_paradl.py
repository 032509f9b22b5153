"""ParaDL's closed forms on ParaDL's own machine against the measurements of its authors.

The measurements are not part of this repository: name the folder that holds them in
SHARDWISE_PUBLISHED_DATA to run these tests.
"""

import csv
import os
import statistics
from pathlib import Path

import pytest
import torch

from shardwise import zoo
from shardwise.graph import capture
from shardwise.machine import Machine
from shardwise.oracle import closed_form as form
from shardwise.oracle.records import records

FOLDER = os.environ.get("SHARDWISE_PUBLISHED_DATA", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="SHARDWISE_PUBLISHED_DATA does not name the folder with the published measurements"
)
# Forward and backward seconds per sample come from the same folder, so that nothing is fitted here.
MODELS = {"ResNet-50": "resnet50", "VGG16": "vgg16"}


def rows(name):
    with open(Path(FOLDER, name), newline="") as file:
        return list(csv.DictReader(file))


def layers_of(model):
    profile = rows("paradl_profiled_compute_per_sample.csv")
    column = "fw_plus_bw_seconds_per_sample_V100_fp32"
    seconds = next(float(row[column]) for row in profile if row["model"] == model)
    graph = capture(zoo.build(MODELS[model]), torch.zeros(1, 3, 224, 224), check=False)
    return records(graph, seconds_per_sample=seconds)


@pytest.mark.parametrize("model", MODELS)
def test_data_parallel_computation_is_what_the_authors_predicted(model):
    layers = layers_of(model)
    published = [r for r in rows("fig2_digitised.csv") if r["model"] == model and r["strategy"] == "data"]
    assert published
    machine = Machine.load("abci")
    ratios = []
    for row in published:
        gpus, batch = int(row["gpus"]), int(row["batch"])
        link = machine.tier(range(gpus)).point_to_point
        setting = form.Setting(batch * gpus, batch * gpus, link.latency_seconds, 1 / link.bytes_per_second)
        ratios.append(form.data(layers, setting, gpus).compute / float(row["oracle_comp_s"]))
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.1)
