"""Streams with a method of their own, and streams that learn nothing."""

import pytest
import torch
from serving import adapter, client, expected, pixels, predict, probabilities

from fata.serve.limits import Limits
from fata.serve.scheduler import Gathering

STREAM = "/v1/streams/camera-7"


def test_a_stream_may_have_another_method(tmp_path):
    batches = list(pixels(20).split(4))
    with client(folder=tmp_path, fleet={"in_memory": 1}) as one:
        made = one.put(STREAM, json={"method": "sar", "lr": 0.2}).json()
        assert (made["method"], made["lr"]) == ("sar", 0.2)
        found = {"camera-7": [], "door": []}
        for batch in batches:
            for name in found:
                found[name].append(probabilities(predict(one, name, batch).json()))
        state = one.get(f"{STREAM}/state").content
        wrong = one.put("/v1/streams/door/state", content=state)
        assert wrong.status_code == 422
        assert "method" in wrong.json()["error"]
        assert one.put(f"{STREAM}/state", content=state).status_code == 204
        assert one.get("/v1/streams/door").json()["method"] == "tent+fata"
    assert found["door"] == expected(batches)
    alone = adapter(spec="sar", lr=0.2)
    assert found["camera-7"] == [alone(batch).softmax(1).tolist() for batch in batches]
    with client(folder=tmp_path) as one:
        assert one.get(STREAM).json()["method"] == "sar"
        assert one.get(STREAM).json()["batches"] == 5
        assert one.put(STREAM, json={"method": None}).json()["batches"] == 0
        assert one.get(STREAM).json()["method"] == "tent+fata"


@pytest.mark.parametrize(("net", "together"), [("resnet_gn", True), ("resnet_bn", False)])
def test_streams_that_learn_nothing_share_a_pass(net, together, monkeypatch):
    """Not where BatchNorm couples the rows; and a stream with weights of its own never does."""
    streams = {name: pixels(2, seed) for seed, name in enumerate(["a", "b", "learned", "adapts"])}
    gathering = Gathering(batch=8, wait=0.3, deadline=60)
    with client(net=net, gathering=gathering, limits=Limits()) as one:
        predict(one, "learned", pixels(4, 9))
        for name in ("a", "b", "learned"):
            assert one.put(f"/v1/streams/{name}", json={"frozen": True}).status_code == 200
        passes, step = [], one.service.fleet.step_together

        def counted(images):
            passes.append(sorted(images))
            return step(images)

        monkeypatch.setattr(one.service.fleet, "step_together", counted)
        futures = {name: one.service.submit(name, rows) for name, rows in streams.items()}
        found = {name: future.result(60) for name, future in futures.items()}
        assert one.get("/v1/streams/a").json()["batches"] == 0
        assert one.get("/v1/streams/adapts").json()["batches"] == 1
    assert passes == ([["a", "b"]] if together else [])
    alone = adapter(net)
    with alone.frozen():
        for name in ("a", "b"):
            assert torch.allclose(found[name].logits, alone(streams[name]), atol=1e-5)
            assert (found[name].note, found[name].learned) == ("frozen", False)
            assert (found[name].record.source_predicted, found[name].record.rows) == (True, 2)
    assert torch.equal(found["adapts"].logits, alone(streams["adapts"]))
    alone.reset()
    alone(pixels(4, 9))
    with alone.frozen():
        assert torch.equal(found["learned"].logits, alone(streams["learned"]))


def test_a_stream_of_the_method_source_learns_nothing():
    with client() as one:
        one.put(STREAM, json={"method": "source"})
        for batch in pixels(8).split(4):
            answer = predict(one, "camera-7", batch).json()
        assert (answer["learned"], answer["predicted_by"]) == (False, "source")
