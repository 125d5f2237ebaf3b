"""The Ray to which a job connects, where a file that every user can write names one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.integrations.ray import session

OTHER = 60_417


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which Ray looks, in a folder that every user can write."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray").chmod(0o777)
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_the_ray_that_this_user_has_started_is_used(
    named: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert session.running() == ""
    assert caplog.text == "", "there is none: nothing to say"
    named.write_text(address)
    assert session.running() == address
    named.write_text("198.51.100.7:6379")
    assert session.running() == "198.51.100.7:6379", "a node's, whose head is another host"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_ray_that_another_user_names_is_not(named: Path, address: str, caplog: pytest.LogCaptureFixture) -> None:
    named.write_text(address)
    os.chown(named, OTHER, OTHER)
    assert session.running() == ""
    assert f"{named} belongs to user {OTHER}: a new Ray is started here" in caplog.text


@pytest.mark.parametrize("kind", ["link", "pipe", "open", "text"])
def test_what_is_no_file_with_an_address_of_this_users_names_no_ray(
    kind: str, named: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "link":
        (named.parent / "mine").write_text(address)
        named.symlink_to("mine")
    elif kind == "pipe":
        os.mkfifo(named)
    else:
        named.write_text(address if kind == "open" else "Loss 0.25\n")
        named.chmod(0o666 if kind == "open" else 0o644)
    assert session.running() == ""
    assert "a new Ray is started here" in caplog.text


def test_a_port_that_another_user_took_is_no_ray_of_this_users(
    named: Path, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    named.write_text(address)
    monkeypatch.setattr(session.owners, "is_ours", lambda user: False)
    monkeypatch.setattr(session.owners, "who_can_change", lambda path, **_: "")
    assert session.running() == ""
    assert f"listens at port {address.rpartition(':')[2]} of this host" in caplog.text
