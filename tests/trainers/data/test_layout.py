from fractions import Fraction

import pytest

from trainers.data.errors import DataError
from trainers.data.layout import Range, days_in, read_meta, split_ranges


def test_last_day_is_halved():
    splits = split_ranges([5, 6, 7])
    assert splits == {
        "train": [Range(0, 0, 5), Range(1, 0, 6)],
        "val": [Range(2, 0, 3)],
        "test": [Range(2, 3, 7)],
    }


def test_one_day_holds_out_its_last_seventh():
    assert split_ranges([70]) == {"train": [Range(0, 0, 60)], "val": [Range(0, 60, 65)], "test": [Range(0, 65, 70)]}


def test_fractions_cut_through_days():
    splits = split_ranges([4, 6], (Fraction("0.5"), Fraction("0.2"), Fraction("0.3")))
    assert splits == {
        "train": [Range(0, 0, 4), Range(1, 0, 1)],
        "val": [Range(1, 1, 3)],
        "test": [Range(1, 3, 6)],
    }


def test_missing_day_is_named(tmp_path):
    for day in (0, 1, 4):
        (tmp_path / f"day_{day}_labels.npy").touch()
    with pytest.raises(DataError, match=r"days \[2, 3\] are missing"):
        days_in(tmp_path)


@pytest.mark.parametrize(("text", "reason"), [("{", "not valid JSON"), ('{"format": "other"}', "format 'other'")])
def test_foreign_meta_is_refused(tmp_path, text, reason):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(DataError, match=reason):
        read_meta(tmp_path)
