"""Forged messages in the job's store or in its exchanges are refused with the name of the key, and never executed."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from grpo_mega.distributed.launch import KEY_VARIABLE, rank_environments
from grpo_mega.distributed.messages import MAC_BYTES, run_key, seal, seal_value, shared_key, unseal, unseal_value
from grpo_mega.distributed.rendezvous import LOOPBACK, Rendezvous, address_to_bind, bound_socket, open_store
from grpo_mega.errors import ConfigError, EngineError

REFUSED = r"^{}: has a value that no rank of this run wrote; keep other users and programs off the job's ports"
TEXTS = ["\u2028 a line\nof \ud800 its own", "", "\x00\x1b[31m", "9" * 700]
FLOATS = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.pi, math.inf, -math.inf, 2.0**53 + 2, 1 / 3]


class Bomb:
    """An object that raises an alarm when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch unpickled",)


GARBAGE = [b"", b"garbage", b"\xff\xfe\x00", b'["not sealed"]', b"5", b"0 0 0\n", b"null", pickle.dumps(Bomb())]


def test_values_arrive_bit_for_bit() -> None:
    found = unseal_value("k", seal_value("k", [TEXTS, FLOATS, {"a": [None, True, -(2**70)]}]))
    assert found[0] == TEXTS and found[2] == {"a": [None, True, -(2**70)]}
    assert [struct.pack("<d", value) for value in found[1]] == [struct.pack("<d", value) for value in FLOATS]
    assert math.isnan(unseal_value("k", seal_value("k", math.nan)))
    assert "\n" not in seal_value("k", TEXTS) and seal_value("k", TEXTS).isascii()
    assert bytes(unseal("k", seal("k", b"\x00\xff"))) == b"\x00\xff" and bytes(unseal("k", seal("k", b""))) == b""


def test_a_message_is_refused_after_any_flipped_bit() -> None:
    sealed = seal("k", b"message")
    for place in range(8 * len(sealed)):
        spoiled = bytearray(sealed)
        spoiled[place // 8] ^= 1 << place % 8
        with pytest.raises(EngineError, match=REFUSED.format("k")):
            unseal("k", bytes(spoiled))
    for length in range(MAC_BYTES + 1):
        with pytest.raises(EngineError):
            unseal("k", sealed[:length])


@pytest.mark.parametrize(
    "names", [("a", "b"), ("job/gather/1/values of rank 1", "job/gather/1/values of rank 11"), ("a", "a\0")]
)
def test_a_message_is_refused_under_another_name(names: tuple[str, str]) -> None:
    with pytest.raises(EngineError, match="no rank"):
        unseal(names[1], seal(names[0], b"message"))
    with pytest.raises(EngineError, match="no rank"):
        unseal_value(names[1], seal_value(names[0], "message"))


def test_each_launch_has_a_key_that_its_ranks_share_and_keep() -> None:
    first, second = (rank_environments({KEY_VARIABLE: "of another run, and long"}, world_size=2) for _ in range(2))
    assert first[0][KEY_VARIABLE] == first[1][KEY_VARIABLE] != second[0][KEY_VARIABLE]
    assert len(first[0][KEY_VARIABLE]) == 64
    program = (
        "import os; from grpo_mega.distributed.messages import run_key; k = run_key(); print(k.decode(),"
        " dict(os.environ))"
    )
    environment = os.environ | {KEY_VARIABLE: "0123456789abcdef!"}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said.split(" ")[0] == "0123456789abcdef!" and KEY_VARIABLE not in said
    short = subprocess.run(
        [sys.executable, "-c", program], env=environment | {KEY_VARIABLE: "short"}, capture_output=True, text=True
    )
    assert f"{KEY_VARIABLE}: " in short.stderr and "16 characters" in short.stderr


def test_ranks_of_torchrun_share_a_key_through_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has one key, so use several processes."""
    program = (
        "import sys; from pathlib import Path; from datetime import timedelta; from torch.distributed import"
        " FileStore\nfrom grpo_mega.distributed.messages import run_key, shared_key\nrank, folder = int(sys.argv[1]),"
        " Path(sys.argv[2])\nstore = FileStore(str(folder / 'store'), 2)\nwith shared_key(store, rank, 2, folder /"
        " 'run'):\n    path = folder / 'run' / 'run_key'\n    print(oct(path.stat().st_mode) if rank == 0 else '')\n   "
        " store.add('entered', 1); store.wait(['go']) if rank else None\n    while rank == 0 and store.add('entered',"
        " 0) < 2: pass\n    store.set('go', '1')\nprint(run_key().decode())\n"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run_key").write_text("of a start that was killed")
    command = [sys.executable, "-c", program]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    first, second = (rank.communicate(timeout=300)[0].split("\n") for rank in ranks)
    assert first[0] == "0o100600" and first[1] == second[1] and len(first[1]) == 64
    assert not (tmp_path / "run" / "run_key").exists()
    monkeypatch.setattr("grpo_mega.distributed.messages.SECONDS_FOR_THE_FILE", 0.3)
    run_key.cache_clear()
    other = HashStore()
    other.set("run_key/digest", "0" * 64)
    with pytest.raises(ConfigError, match="key"), shared_key(other, 1, 2, tmp_path):
        pass


def store() -> TCPStore:
    return open_store(LOOPBACK, 0, timedelta(seconds=60))


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
@pytest.mark.parametrize("kind", ["get", "try_get", "gather"])
def test_garbage_in_a_key_gives_a_one_line_error_that_names_it(
    garbage: bytes, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = store()
    party = Rendezvous(job, 0, 1)
    key = "gather/1/values" if kind == "gather" else "port"
    if kind == "gather":
        garbage = garbage or b"\n"  # appending nothing changes nothing
        job.append(key, garbage if garbage.endswith(b"\n") else garbage + b"\n")  # type: ignore[attr-defined]
    else:
        job.set(key, garbage)
    job.get(key)  # an answered request means that the request before it is done
    acts: dict[str, Callable[[], object]] = {
        "get": lambda: party.get(key, 5.0),
        "try_get": lambda: party.try_get(key),
        "gather": lambda: party.all_gather("p", 1, 5.0),
    }
    with pytest.raises(EngineError, match=REFUSED.format(f"job/{key}.*")) as error:
        acts[kind]()
    assert "\n" not in str(error.value) and not (tmp_path / "unpickled").exists()


def test_a_value_is_refused_under_another_key_rank_turn_or_store() -> None:
    job = store()
    party, other = Rendezvous(job, 0, 1), Rendezvous(job, 0, 1, scope="engine of rank 0")
    party.set("a", "text")
    job.set("b", job.get("a"))
    assert party.get("a", 5.0) == "text"
    with pytest.raises(EngineError, match=r"^job/b: "):
        party.get("b", 5.0)
    with pytest.raises(EngineError, match=r"^engine of rank 0/a: "):
        other.get("a", 5.0)
    assert party.all_gather("p", "first", 5.0) == ["first"]
    replayed = job.get("gather/1/values")
    job.append("gather/2/values", replayed)  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"^job/gather/2/values of rank 0: "):
        party.all_gather("p", "second", 5.0)


@pytest.mark.parametrize("forged", [b"-7", b"5", b"none", b""], ids=repr)
def test_counters_that_no_rank_counted_are_refused(forged: bytes) -> None:
    job = store()
    party = Rendezvous(job, 0, 2)
    for key, act in (
        ("gather/1/count", lambda: party.all_gather("p", 1, 1.0)),
        ("prompts/1", lambda: party.fetch_add("prompts/1", limit=4)),
    ):
        job.set(key, forged)
        assert job.get(key) == forged  # the store has it before another connection asks
        with pytest.raises(EngineError, match=REFUSED.format(f"job/{key}")):
            act()


def test_an_exchange_that_is_called_done_too_early_is_refused() -> None:
    job = store()
    job.set("gather/1/done", "")
    with pytest.raises(EngineError, match=r"^job/gather/1/done: "):
        Rendezvous(job, 0, 2).all_gather("p", 1, 5.0)


def test_many_ranks_exchange_values_through_a_bound_store() -> None:
    job, num_ranks = store(), 5
    parties = [Rendezvous(TCPStore(LOOPBACK, job.port, is_master=False), rank, num_ranks) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        for turn in range(3):
            values = [[rank, turn, TEXTS[0], FLOATS[4]] for rank in range(num_ranks)]
            calls = [
                pool.submit(party.all_gather, "p", value, 60.0) for party, value in zip(parties, values, strict=True)
            ]
            assert [call.result() for call in calls] == [values] * num_ranks


def test_a_rank_with_another_key_is_refused() -> None:
    job = store()
    Rendezvous(job, 0, 2).set("port", "1")
    program = (
        "import sys; from torch.distributed import TCPStore; from grpo_mega.distributed.rendezvous import Rendezvous\n"
        f"Rendezvous(TCPStore('127.0.0.1', {job.port}, is_master=False), 1, 2).get('port', 9.0)"
    )
    environment = os.environ | {KEY_VARIABLE: "f" * 64}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "EngineError: job/port: " in done.stderr


NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def test_the_address_to_listen_on_is_the_loopback_or_the_masters(capsys: pytest.CaptureFixture[str]) -> None:
    one_machine = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "203.0.113.9"}
    assert address_to_bind(one_machine) == "127.0.0.1"
    assert address_to_bind(NODES | {"MASTER_ADDR": "203.0.113.9"}) == "203.0.113.9"
    assert address_to_bind(NODES | {"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    assert capsys.readouterr().err == ""


def test_an_address_that_other_nodes_cannot_reach_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian maps a machine's name to 127.0.1.1. A service's address belongs to no interface."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    assert address_to_bind(NODES | {"MASTER_ADDR": "node-7"}) == ""
    assert "MASTER_ADDR=node-7 " in capsys.readouterr().err
    with bound_socket("203.0.113.9", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert "203.0.113.9 " in capsys.readouterr().err


def test_a_used_port_gives_a_one_line_error() -> None:
    with bound_socket(LOOPBACK, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^MASTER_PORT={port}: .*127.0.0.1; choose another"):
            bound_socket(LOOPBACK, port)


def test_json_of_a_forged_store_is_not_read_before_its_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("it was read"))
    with pytest.raises(EngineError):
        unseal_value("k", b"0" * 64 + b' ["x"]')
