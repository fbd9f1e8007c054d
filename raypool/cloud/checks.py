"""Checks of files, before money is spent: of clusters for Ray's launcher, of clusters on Kubernetes, of training jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypool.cloud import kubernetes_checks, launcher_checks, spec
from raypool.cloud.documents import Document, Findings, read_documents
from raypool.errors import CloudError


def check_file(path: str | Path) -> None:
    """Make sure that the documents of a file can work.

    Raises:
        CloudError: It cannot be read, there is nothing in it, or something is wrong with it; says what, with its line.
    """
    documents = [document for document in read_documents(path) if document.content is not None]
    if not documents:
        raise CloudError(f"{path}: there is nothing in it. `raypool cluster init` writes a file to begin with.")
    if any(kubernetes_checks.is_manifest(document.content) for document in documents):
        documents = [document for document in documents if not _is_foreign(document.content)]
    problems = []
    for document in documents:
        try:
            check(document)
        except CloudError as error:
            problems.append(str(error))
    if problems:
        raise CloudError("\n".join(problems))


def _is_foreign(content: Any) -> bool:
    """Say whether this is something of Kubernetes' own, as may stand beside a cluster: a Secret, a Service."""
    return isinstance(content, dict) and "apiVersion" in content and not kubernetes_checks.is_manifest(content)


def check(document: Document) -> None:
    """Make sure that a document can work, of whichever kind it is.

    Raises:
        CloudError: It is of no kind that is known here, or something is wrong with it.
    """
    content = document.content
    if not isinstance(content, dict):
        raise CloudError(f"{document.name}, line 1: a mapping is wanted (`name: value`), not {type(content).__name__}.")
    if kubernetes_checks.is_manifest(content):
        findings = Findings(document)
        findings.check_filled_in()
        kubernetes_checks.check(findings)
        findings.refuse()
    elif spec.is_training(content):
        spec.check(document)
    elif "provider" in content or "cluster_name" in content:
        launcher_checks.check(document)
    else:
        kinds = "a cluster for Ray's launcher has a provider, one on Kubernetes an apiVersion, a training job a trainingInput"
        raise CloudError(f"{document.name}, line 1: what this is cannot be seen: {kinds}.")
