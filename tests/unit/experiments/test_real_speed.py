"""The time of a step by loss, as the page shows it."""

from experiments.real import speed
from experiments.real.methods import METHODS


def test_rows_are_ordered_by_the_time_of_the_loss_and_compared_with_cross_entropy() -> None:
    rows = [
        {"method": name, "tokens_per_second": rate, "loss_ms": loss}
        for name, rate, loss in (("ce", 100.0, 1.0), ("uld", 25.0, 9.0), ("chain", 50.0, 3.0))
    ]
    found = speed.shown({"rows": rows})
    assert [(row["title"], row["ratio"]) for row in found] == [
        (METHODS[name].title, ratio) for name, ratio in (("ce", 1.0), ("chain", 2.0), ("uld", 4.0))
    ]
