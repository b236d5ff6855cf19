"""Counts of requests to a teacher's servers, on their way from its worker to the trainer."""

from xtoken_core.served_requests import RequestCounts, requests_field, take_requests


def test_counts_of_several_teachers_are_summed_and_taken_from_the_columns() -> None:
    counts = RequestCounts(24, 2, 1 << 40, 1.25), RequestCounts(8, 0, 3, 0.5)
    columns = {requests_field(teacher): made.column(3) for teacher, made in enumerate(counts)}
    assert list(columns) == ["teacher_0_requests", "teacher_1_requests"]
    assert all((column.rows, column.item_shape, len(column.values)) == (3, (4,), 96) for column in columns.values())
    columns["other"] = counts[0].column(1)
    assert take_requests(columns, [1, 2]) == counts[1]
    assert list(columns) == ["teacher_0_requests", "other"]
    columns[requests_field(1)] = counts[1].column(3)
    assert take_requests(columns, [0, 1]) == RequestCounts(32, 2, (1 << 40) + 3, 1.75)
    assert list(columns) == ["other"]
    assert take_requests(columns, [0, 1]) == RequestCounts()


def test_counts_since_earlier_ones() -> None:
    assert RequestCounts(5, 1, 90, 2.0).less(RequestCounts(3, 1, 60, 0.5)) == RequestCounts(2, 0, 30, 1.5)
