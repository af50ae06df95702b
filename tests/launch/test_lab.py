"""The one-GPU lab, with a stand-in for the MPS control program: what it starts it ends, what it lacks it says in a line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.lab import LabError, OneGpuLab, mps, nccl
from launch.lab.__main__ import main
from launch.lab.mps import PrivateMps
from launch.lab.mps_keeper import daemon_pid
from tests.launch import commands

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "launch" / "fake_mps"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """One that has the control program, and none of the variables the lab looks at."""
    for name in (mps.PIPES, mps.LOGS, nccl.SETTING, "LD_PRELOAD", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "FAKE_MPS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{FAKE}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture(scope="module")
def nccl_of(tmp_path_factory):
    """The path of a library that says it is NCCL of that version."""

    def build(code: int) -> str:
        library = tmp_path_factory.getbasetemp() / f"libnccl_{code}.so.2"
        source = f"int ncclGetVersion(int* v) {{ *v = {code}; return 0; }}"
        subprocess.run(
            ["g++", "-x", "c", "-", "-shared", "-fPIC", "-o", library], input=source, text=True, check=True, timeout=60
        )
        return str(library)

    return build


def until(holds, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not (value := holds()):
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.01)
    return value


def gone(pid: int) -> bool:
    """Ended, whether or not its parent has looked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def started_daemon() -> tuple[Path, int]:
    directory = Path(os.environ[mps.PIPES])
    pid = daemon_pid(directory)
    assert pid is not None
    return directory, pid


def test_starts_a_daemon_sets_the_environment_and_undoes_both():
    with OneGpuLab(4, needs_nccl=False) as lab:
        directory, pid = started_daemon()
        assert lab.mps == "private"
        assert not gone(pid)
        assert lab.environment == {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            "CUDA_MPS_PIPE_DIRECTORY": str(directory),
            "CUDA_MPS_LOG_DIRECTORY": str(directory),
        }
    assert gone(pid)
    assert not directory.exists()
    assert not lab.environment
    assert "NCCL_NVLS_ENABLE" not in os.environ
    assert mps.PIPES not in os.environ


def test_ends_the_daemon_on_an_exception():
    started = []

    def fail_inside():
        with OneGpuLab(2, needs_nccl=False):
            started.append(started_daemon()[1])
            raise RuntimeError("of the run's own")

    with pytest.raises(RuntimeError, match="of the run's own"):
        fail_inside()
    assert gone(started[0])


OWNER = """
import os, sys, time
from launch.lab import OneGpuLab
lab = OneGpuLab(2, needs_nccl=False)
if sys.argv[1:]:
    lab.outlive_exec()
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
print(os.environ["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
time.sleep(60)
"""


REPLACEMENT = "import os, time; print(os.environ['CUDA_MPS_PIPE_DIRECTORY'], flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("number", "replaced"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGKILL, False), (signal.SIGKILL, True)],
)
def test_ends_the_daemon_however_its_owner_ends(number, replaced):
    command = [sys.executable, "-c", OWNER, *([REPLACEMENT] if replaced else [])]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **quiet, start_new_session=True) as owner:
        directory = Path(owner.stdout.readline().strip())
        pid = daemon_pid(directory)
        assert pid is not None
        assert not gone(pid)
        os.killpg(owner.pid, number)  # as a terminal does
        owner.wait(20)
    until(lambda: gone(pid))
    until(lambda: not directory.exists())


def test_the_users_own_daemon_is_used_and_left_alone(tmp_path, monkeypatch):
    theirs = PrivateMps(tmp_path / "theirs")
    pid = daemon_pid(theirs.directory)
    monkeypatch.setenv(mps.PIPES, str(theirs.directory))
    with OneGpuLab(2, needs_nccl=False) as lab:
        assert lab.mps == "user's"
        assert os.environ[mps.PIPES] == str(theirs.directory)
    assert not gone(pid)
    assert os.environ[mps.PIPES] == str(theirs.directory)
    theirs.close()
    assert gone(pid)


def test_a_second_daemon_in_one_directory_is_refused(tmp_path):
    first = PrivateMps(tmp_path / "d")
    with pytest.raises(LabError, match="in use by another MPS daemon"):
        PrivateMps(tmp_path / "d")
    assert daemon_pid(first.directory) is not None
    first.close()


def test_a_daemon_that_does_not_quit_is_killed(monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    with OneGpuLab(2, needs_nccl=False):
        _, pid = started_daemon()
    assert gone(pid)


@pytest.mark.parametrize(
    ("mood", "said"), [("fails", "did not start .exit code 1.: Failed to start: no GPU"), ("mute", "does not answer")]
)
def test_a_daemon_that_does_not_start_is_an_error_and_leaves_nothing(mood, said, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_MPS", mood)
    before = dict(os.environ)
    with pytest.raises(LabError, match=said):
        OneGpuLab(2, needs_nccl=False)
    assert dict(os.environ) == before
    if mood == "fails":
        assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    with pytest.raises(LabError, match="unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
        OneGpuLab(2, needs_nccl=False)
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    monkeypatch.setenv(mps.PIPES, str(tmp_path))
    with pytest.raises(LabError, match="no MPS daemon answers there"):
        OneGpuLab(2, needs_nccl=False)
    with pytest.raises(LabError, match="mps=off, but CUDA_MPS_PIPE_DIRECTORY"):
        OneGpuLab(2, needs_nccl=False, use_mps=False)
    monkeypatch.delenv(mps.PIPES)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LabError, match=r"nvidia-cuda-mps-control is not on PATH.*mps=off"):
        OneGpuLab(2, needs_nccl=False)
    with OneGpuLab(2, needs_nccl=False, use_mps=False) as lab:
        assert lab.mps == "off"
        assert mps.PIPES not in os.environ


def test_one_rank_a_gpu_needs_nothing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    before = dict(os.environ)
    with OneGpuLab(1) as lab:
        assert lab.mps == "none"
        assert dict(os.environ) == before
        lab.check_in_use()


def test_the_library_is_checked_and_put_in_front(nccl_of, monkeypatch, tmp_path):
    with pytest.raises(LabError, match=r"has NCCL 2\.29\.7; ranks that share a card need 2\.30 or later: `pip install"):
        OneGpuLab(2, nccl_path=nccl_of(22907))
    with pytest.raises(LabError, match="is not a file; get one by `pip install"):
        OneGpuLab(2, nccl_path=str(tmp_path / "nowhere"))
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(LabError, match=r"cannot be used: .*file too short"):
        OneGpuLab(2, nccl_path=str(tmp_path / "text.so"))
    library = nccl_of(23203)
    monkeypatch.setenv("LD_PRELOAD", f"/other.so:{library}")
    monkeypatch.setenv(nccl.SETTING, library)
    with OneGpuLab(2):
        assert os.environ["LD_PRELOAD"] == f"{library}:/other.so"
    assert os.environ["LD_PRELOAD"] == f"/other.so:{library}"


def test_torchs_own_library_is_checked_where_none_is_named(monkeypatch):
    monkeypatch.setattr(nccl, "loaded_version", lambda: (2, 29, 7))
    with pytest.raises(LabError, match=r"torch has NCCL 2\.29\.7"):
        OneGpuLab(2)
    monkeypatch.setattr(nccl, "loaded_version", lambda: None)
    with pytest.raises(LabError, match="torch has no NCCL"):
        OneGpuLab(2)
    monkeypatch.setattr(nccl, "loaded_version", lambda: (2, 30, 0))
    with OneGpuLab(2):
        assert "LD_PRELOAD" not in os.environ


def test_ranks_that_do_not_reach_the_daemon_are_noticed():
    with OneGpuLab(2, needs_nccl=False) as lab:
        with pytest.raises(LabError, match="none of them has connected to the MPS daemon"):
            lab.check_in_use()
        (Path(os.environ[mps.PIPES]) / "servers").write_text("4242")
        lab.check_in_use()


def test_a_command_runs_inside(nccl_of, capfd):
    library = f"nccl={nccl_of(23203)}"
    script = "import os, sys; print(os.environ['CUDA_MPS_PIPE_DIRECTORY']); sys.exit(7)"
    assert main(["ranks_per_gpu=2", library, "--", sys.executable, "-c", script]) == 7
    directory = Path(capfd.readouterr().out.strip())
    assert directory.name.startswith("fusecomm-mps-")
    assert not directory.exists()
    assert main(["ranks_per_gpu=2", library, "--", "/no/such/program"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ranks_per_gpu=2"], "expected ranks_per_gpu=N -- COMMAND..."),
        (["ranks_per_gpu=1", "--", "true"], "ranks_per_gpu must be a whole number from 2 up, got '1'"),
        (["rank=2", "--", "true"], "unknown key 'rank'; keys: ranks_per_gpu, nccl, mps"),
        (["ranks_per_gpu=2", "mps=maybe", "--", "true"], "mps must be on or off, got 'maybe'"),
    ],
)
def test_bad_words_are_one_line(words, said, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == f"launch.lab: {said}\n"


RANK = """
import json, os, sys, time
from pathlib import Path
from launch.lab import LabError, torchrun
from launch.lab.mps_keeper import daemon_pid
from tests.launch import commands
try:
    torchrun.enter(2, timeout_s=60)
except LabError as error:
    os.write(1, (json.dumps({"problem": str(error)}) + "\\n").encode())  # in one piece, beside the other rank's
    sys.exit(0)
def meet(where):  # the daemon ends with the first rank
    Path(f"{sys.argv[0]}.{where}.{os.environ['RANK']}").touch()
    while not all(Path(f"{sys.argv[0]}.{where}.{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
meet("before")
time.sleep(0.7)  # in which a daemon that does not live on would end
names = ("CUDA_MPS_PIPE_DIRECTORY", "LD_PRELOAD", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "FUSECOMM_INSIDE_LAB")
said = {name: os.environ.get(name) for name in names}
said["daemon"] = daemon_pid(Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]))
said["arguments"] = sys.argv[1:]
os.write(1, (json.dumps(said) + "\\n").encode())
meet("after")
"""


def torchrun_of_two(tmp_path, *arguments):
    """What each of two ranks said, by torchrun's own words a line of JSON each."""
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "rank.py"), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ranks_of_torchrun_share_one_lab_and_load_its_library(tmp_path, nccl_of, monkeypatch):
    library = nccl_of(23203)
    monkeypatch.setenv(nccl.SETTING, library)
    first, second = torchrun_of_two(tmp_path, "a word")
    assert first == second
    assert first["LD_PRELOAD"] == library
    assert (first["NCCL_MAX_CTAS"], first["NCCL_NVLS_ENABLE"]) == ("8", "0")
    assert first["arguments"] == ["a word"]
    assert first["daemon"] is not None
    until(lambda: gone(first["daemon"]))
    until(lambda: not Path(first["CUDA_MPS_PIPE_DIRECTORY"]).exists())


def test_what_the_first_rank_lacks_all_ranks_say(tmp_path, nccl_of, monkeypatch):
    monkeypatch.setenv(nccl.SETTING, nccl_of(22907))
    first, second = torchrun_of_two(tmp_path)
    assert first == second
    assert "has NCCL 2.29.7; ranks that share a card need 2.30 or later" in first["problem"]


def train_on_a_shared_card(tmp_path, **more):
    arguments = ["comm=fused", "trainer.device=cuda", "trainer.ranks_per_gpu=2", "hydra.run.dir=run"]
    return commands.run(commands.TORCHRUN_OF_TWO, *arguments, cwd=tmp_path, **more)


def test_training_sets_the_lab_up_and_goes_on_in_one_directory(tmp_path, nccl_of):
    done = train_on_a_shared_card(tmp_path, FUSECOMM_NCCL=nccl_of(23203))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml", "rank_0_of_2", "rank_1_of_2"}
    until(lambda: not list(tmp_path.glob("fusecomm-mps-*")))


def test_training_says_in_one_line_what_the_lab_lacks(tmp_path, nccl_of):
    done = train_on_a_shared_card(tmp_path, FUSECOMM_NCCL=nccl_of(22907))
    said = [line for line in done.stderr.splitlines() if line.startswith("launch.train: ")]
    assert len(said) == 1
    assert "trainer.ranks_per_gpu=2: nccl=" in said[0]
    assert not (tmp_path / "run").exists()
