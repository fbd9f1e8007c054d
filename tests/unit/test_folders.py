"""Folders for this user only are taken over from nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raypool.worker.folders import hold, make_private, remove_unheld


def test_a_folder_that_is_made_or_ones_own_is_taken(tmp_path: Path) -> None:
    for _ in range(2):
        folder = make_private(tmp_path / "a" / "b")
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="it is a link"):
        make_private(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o777)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(PermissionError, match="it belongs to user 12345"):
        make_private(tmp_path / "theirs")


def test_only_a_folder_that_nobody_holds_is_removed(tmp_path: Path) -> None:
    """Whoever removes it may be in another container, where the holder's process cannot be seen."""
    held = hold(tmp_path / "ray")
    remove_unheld(tmp_path / "ray")
    assert (tmp_path / "ray").is_dir()
    os.close(held)
    remove_unheld(tmp_path / "ray")
    assert not (tmp_path / "ray").exists()
    (tmp_path / "new").mkdir()
    remove_unheld(tmp_path / "new")
    assert (tmp_path / "new").is_dir(), "somebody is about to hold it"
