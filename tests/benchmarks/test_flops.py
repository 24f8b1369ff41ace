"""The benchmark that counts operations."""

from benchmarks import flops


def test_the_tail_is_a_part_of_a_pass_and_a_step_with_fata_costs_more(monkeypatch, capsys):
    monkeypatch.setattr(flops, "NETWORKS", ("resnet10t",))
    flops.main()
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["network", "layer"]
    name, layer, _, tail, ratio = line.split()
    assert (name, layer) == ("resnet10t", "layer3")
    assert 0 < float(tail) < 1 < float(ratio) < 2
