"""A few of the jobs of `python -m tests.stress.clean_exit`, and proof that it notices one that ends badly."""

from tests.stress import clean_exit


def test_jobs_end_with_exit_code_zero_and_in_silence():
    assert [clean_exit.run_job() for _ in range(2)] == [[], []]


def test_a_job_that_ends_badly_is_noticed(monkeypatch):
    monkeypatch.setattr(clean_exit, "JOB", "import os; os.abort() if os.environ['RANK'] == '1' else print('hello')")
    quiet, aborted = clean_exit.run_job()
    assert "rank 0: exit code 0, said: hello" in quiet
    assert "rank 1: exit code -6" in aborted
