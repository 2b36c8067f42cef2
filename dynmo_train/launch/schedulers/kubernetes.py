"""Kubernetes manifests: training jobs, data jobs and volume claims.

``PyTorchJob`` (kubeflow.org/v1) belongs to Kubeflow's training operator, ``TrainJob`` (trainer.kubeflow.org/v1alpha1)
to its successor Kubeflow Trainer; an indexed ``Job`` with a headless service needs no operator. Every pod runs one
launcher. Its rank and the address of the first pod come from environment variables of the operator.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import typer

from ..._common.document import MAX_COUNT, MAX_JOBS, parse_any_json
from ..._common.errors import DynmoError, UsageError
from ..._common.panel import Panel
from ..options import (
    Arguments,
    DryRun,
    Exports,
    HangOptions,
    JobName,
    MaxRestarts,
    NodeCount,
    ProcessOptions,
    parse_node_range,
)
from .job_script import parse_exports

PORT = 29500
Version = tuple[int, int]
# The field of each version of Kubeflow Trainer that overrides pods of a runtime, from its published Python models
# (kubeflow_trainer_api). Each field replaced the previous one; only 2.3 and newer can set the grace period.
TRAINER_OVERRIDES: Mapping[Version, str] = {
    (2, 0): "podSpecOverrides",
    (2, 1): "podTemplateOverrides",
    (2, 2): "runtimePatches",
    (2, 3): "runtimePatches with terminationGracePeriodSeconds",
}
# Seconds to save within the default termination grace period of 30 s.
DEFAULT_SAVE_S = 15
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?")
# The launcher command is passed as arguments of bash, so that user input is never part of the script text.
_EXEC_ARGUMENTS = 'exec "$0" "$@"'


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A persistent volume claim and its mount path."""

    name: str
    path: str


class ManifestKind(StrEnum):
    """Kind of the Kubernetes object that runs the command."""

    PYTORCHJOB = "pytorchjob"
    TRAINJOB = "trainjob"
    INDEXED = "indexed-job"
    DATA = "job"


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """Resources of a pod."""

    PANEL: ClassVar[str] = "Pod"

    efa: Annotated[
        int, typer.Option("--efa", min=0, max=MAX_JOBS, envvar="EFA_PER_NODE", help="EFA devices per node.")
    ] = 0
    cpus: Annotated[str, typer.Option("--cpus", help="CPUs per pod.")] = ""
    memory: Annotated[str, typer.Option("--memory", help="Memory per pod, such as 64Gi.")] = ""
    instance_type: Annotated[
        str, typer.Option("--instance-type", envvar="INSTANCE_TYPE", help="Instance type of the nodes.")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class VolumeOptions:
    """Persistent volume claims."""

    PANEL: ClassVar[str] = "Volumes"

    claim: Annotated[
        list[str] | None,
        typer.Option("--claim", metavar="NAME:/PATH", help="Persistent volume claim and its mount path; repeatable."),
    ] = None
    claim_size: Annotated[
        str, typer.Option("--claim-size", help="Create the claims with this size, such as 1200Gi.")
    ] = ""
    storage_class: Annotated[str, typer.Option("--storage-class", help="Storage class of created claims.")] = ""


@dataclass(frozen=True, kw_only=True)
class VersionOptions:
    """What is installed on the cluster."""

    PANEL: ClassVar[str] = Panel("Versions", rare=True)

    runtime: Annotated[str, typer.Option("--runtime", help="Training runtime of a trainjob.")] = "torch-distributed"
    trainer_version: Annotated[
        str, typer.Option("--trainer-version", help="Kubeflow Trainer version of a trainjob.")
    ] = "2.3"
    kubernetes_version: Annotated[
        str | None,
        typer.Option("--kubernetes-version", help="Kubernetes version of the cluster [default: from kubectl]."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class KubernetesJob(HangOptions, VersionOptions, VolumeOptions, PodOptions, ProcessOptions):
    """A command in Kubernetes pods; a pod that is terminated has ``save_s`` seconds to save."""

    arguments: Arguments
    image: Annotated[str, typer.Option("--image", envvar="IMAGE_URI", help="Container image.")]
    kind: Annotated[
        ManifestKind,
        typer.Option("--kind", help="Kubeflow pytorchjob or trainjob, indexed-job, or job for a data command."),
    ] = ManifestKind.PYTORCHJOB
    nodes: NodeCount = None
    job_name: JobName = "dynmo"
    namespace: Annotated[str, typer.Option("--namespace", help="Kubernetes namespace.")] = "default"
    export: Exports = None
    max_restarts: MaxRestarts = 3
    save_s: Annotated[
        int, typer.Option("--save-s", min=0, max=MAX_COUNT, help="Seconds that a pod has to save at termination.")
    ] = 60
    dry_run: DryRun = False

    def __post_init__(self) -> None:
        if self.min_nodes != self.max_nodes and self.kind in (ManifestKind.TRAINJOB, ManifestKind.DATA):
            raise UsageError(
                f"--nodes {self.nodes}: must be a fixed number with --kind {self.kind}; use --nodes N, or"
                " --kind pytorchjob"
            )
        for option, value in (("--job-name", self.job_name), ("--namespace", self.namespace)):
            if not _NAME.fullmatch(value):
                raise UsageError(f"{option} {value!r}: must be at most 53 lowercase letters, digits and dashes")
        parse_version("--trainer-version", self.trainer_version)  # also refused with another --kind

    @property
    def min_nodes(self) -> int:
        """Minimum number of pods."""
        return parse_node_range("--nodes", self.nodes or "1")[0]

    @property
    def max_nodes(self) -> int:
        """Maximum number of pods."""
        return parse_node_range("--nodes", self.nodes or "1")[1]

    @property
    def claims(self) -> list[Claim]:
        """The persistent volume claims."""
        return [parse_claim(text) for text in self.claim or ()]

    @property
    def trainer(self) -> Version:
        """The version of Kubeflow Trainer."""
        return parse_version("--trainer-version", self.trainer_version)


def parse_claim(text: str) -> Claim:
    """Parse ``NAME:/PATH``, the value of ``--claim``.

    Raises:
        UsageError: the value has another form, or a name that Kubernetes refuses (RFC 1123).
    """
    name, colon, path = text.partition(":")
    if not colon or not _NAME.fullmatch(name) or not path.startswith("/"):
        raise UsageError(f"--claim {text!r}: must be NAME:/PATH")
    return Claim(name=name, path=path)


def _resources(job: KubernetesJob) -> dict[str, Any]:
    devices: dict[str, Any] = {}
    if job.gpus:
        devices["nvidia.com/gpu"] = job.gpus
    if job.efa:
        devices["vpc.amazonaws.com/efa"] = job.efa
        devices["hugepages-2Mi"] = "5120Mi"
    sizes = {name: value for name, value in (("cpu", job.cpus), ("memory", job.memory)) if value}
    return {"requests": {**sizes, **devices}, "limits": {**sizes, **devices}} if sizes or devices else {}


def _mounts(job: KubernetesJob) -> list[dict[str, Any]]:
    # Data loading and NCCL need more shared memory than the 64 MiB of a pod.
    shared_memory = [{"name": "shm", "mountPath": "/dev/shm"}]
    return [*shared_memory, *({"name": claim.name, "mountPath": claim.path} for claim in job.claims)]


def _volumes(job: KubernetesJob) -> list[dict[str, Any]]:
    shared_memory: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return [*shared_memory, *({"name": c.name, "persistentVolumeClaim": {"claimName": c.name}} for c in job.claims)]


def _environment(job: KubernetesJob) -> list[dict[str, str]]:
    fabric = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"} if job.efa else {}
    return [{"name": name, "value": value} for name, value in {**fabric, **parse_exports(job.export or ())}.items()]


def _pod(job: KubernetesJob, container: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [container], "volumes": _volumes(job)}
    if job.instance_type:
        spec["nodeSelector"] = {"node.kubernetes.io/instance-type": job.instance_type}
    return spec


def _training_pod(job: KubernetesJob, container: dict[str, Any]) -> dict[str, Any]:
    # The launcher ends after its processes.
    return {**_pod(job, container), "terminationGracePeriodSeconds": job.save_s + 15}


def _container(job: KubernetesJob, name: str, command: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "image": job.image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "env": _environment(job),
        "volumeMounts": _mounts(job),
    }
    if resources := _resources(job):
        found["resources"] = resources
    return found


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A field of a manifest, and the first version of a product that supports it."""

    product: str
    version: Version
    field: str

    @property
    def text(self) -> str:
        """The requirement as text."""
        return f"{self.product} {self.version[0]}.{self.version[1]} or newer ({self.field})"


def parse_version(option: str, text: str) -> Version:
    """Parse ``1.31``, ``v1.31.2`` or ``1.31+``, as ``kubectl version`` prints them, into (1, 31).

    Raises:
        UsageError: the text has another form.
    """
    match = re.match(r"v?(\d{1,9})\.(\d{1,9})(?:[.+-].*)?$", text)
    if match is None:
        raise UsageError(f"{option} {text!r}: must be a version such as 1.31")
    return int(match[1]), int(match[2])


def override_version(version: Version) -> Version:
    """The newest version in ``TRAINER_OVERRIDES`` up to ``version``.

    Raises:
        UsageError: there is none: the Trainer is older than any that has TrainJobs.
    """
    known = [each for each in TRAINER_OVERRIDES if each <= version]
    if not known:
        found = f"{version[0]}.{version[1]}"
        raise UsageError(f"--trainer-version {found}: must be 2.0 or newer for a TrainJob; or use --kind pytorchjob")
    return max(known)


def indexed_requirements(job: KubernetesJob) -> list[Requirement]:
    """The Kubernetes version that an indexed job requires."""
    found = [Requirement(product="Kubernetes", version=(1, 24), field="Job.spec.completionMode Indexed")]
    if job.min_nodes != job.max_nodes:
        found.append(Requirement(product="Kubernetes", version=(1, 31), field="Job.spec.successPolicy"))
    return found


def pytorch_requirements(job: KubernetesJob) -> list[Requirement]:
    """The training operator version that a PyTorchJob requires."""
    if job.min_nodes == job.max_nodes:
        return []
    return [Requirement(product="Kubeflow training operator", version=(1, 4), field="PyTorchJob.spec.elasticPolicy")]


def trainer_requirements(job: KubernetesJob) -> list[Requirement]:
    """The Kubeflow Trainer version that a TrainJob requires."""
    version = override_version(job.trainer)
    return [
        Requirement(product="Kubeflow Trainer", version=version, field=f"TrainJob.spec.{TRAINER_OVERRIDES[version]}")
    ]


def check_version(requirements: Sequence[Requirement], product: str, version: Version, source: str) -> None:
    """Check that a product is as new as a manifest requires.

    Args:
        requirements: requirements of the manifest.
        product: name of the product.
        version: its version.
        source: option or place of the version, for the message.

    Raises:
        UsageError: it is older; a cluster would drop the unknown fields without a word.
    """
    missing = [each for each in requirements if each.product == product and each.version > version]
    if missing:
        found = f"{version[0]}.{version[1]}"
        raise UsageError(
            f"{source} {found}: the manifest requires {' and '.join(each.text for each in missing)}; use a fixed"
            " --nodes N, or --kind pytorchjob"
        )


def _launcher(job: KubernetesJob) -> list[str]:
    return [
        *("dynmo-train", "launch", "node", "--nproc", str(job.nproc), "--nnodes", f"{job.min_nodes}:{job.max_nodes}"),
        *("--job", job.job_name, "--max-restarts", str(job.max_restarts)),
        *("--save-s", str(job.save_s), *job.hang_words, "--", *job.arguments),
    ]


def _metadata(job: KubernetesJob) -> dict[str, Any]:
    return {"name": job.job_name, "namespace": job.namespace}


def pytorch_job(job: KubernetesJob) -> dict[str, Any]:
    """The ``PyTorchJob``: a master and its workers, also for an elastic job.

    A pod that exits with 0 is complete: its node is free and the others continue. The job succeeds with its master. An
    elastic job of workers alone would succeed with the first worker (UpdateJobStatus in pytorchjob_controller.go of
    the training operator, release 1.9), that is with the first released node. ``cleanPodPolicy`` removes pods that
    have not started by then.
    """
    elastic = job.min_nodes != job.max_nodes
    text = f'export NODE_RANK="$RANK" MASTER_ADDR="$MASTER_ADDR" MASTER_PORT={PORT} && {_EXEC_ARGUMENTS}'
    container = _container(job, "pytorch", ["bash", "-c", text, *_launcher(job)])
    container["ports"] = [{"containerPort": PORT, "name": "pytorchjob-port"}]

    def replicas(count: int) -> dict[str, Any]:
        """The spec of ``count`` pods of one role."""
        return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": _training_pod(job, container)}}

    policy: dict[str, Any] = {"cleanPodPolicy": "Running" if elastic else "None", "backoffLimit": job.max_restarts}
    spec: dict[str, Any] = {"runPolicy": policy}
    if elastic:
        policy["schedulingPolicy"] = {"minAvailable": job.min_nodes}
        spec["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "minReplicas": job.min_nodes,
            "maxReplicas": job.max_nodes,
            "maxRestarts": job.max_restarts,
        }
    workers = {"Worker": replicas(job.max_nodes - 1)} if job.max_nodes > 1 else {}
    spec["pytorchReplicaSpecs"] = {"Master": replicas(1), **workers}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _metadata(job), "spec": spec}


def usable_save_s(job: KubernetesJob) -> int:
    """Seconds to save of a TrainJob; before Trainer 2.3 the runtime determines the grace period."""
    return job.save_s if override_version(job.trainer) >= (2, 3) else min(job.save_s, DEFAULT_SAVE_S)


def train_job(job: KubernetesJob) -> dict[str, Any]:
    """The ``TrainJob`` of Kubeflow Trainer 2, for version ``job.trainer``, on a training runtime of the cluster."""
    version = override_version(job.trainer)
    job = replace(job, save_s=usable_save_s(job))
    text = (
        'export NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT" && '
        + _EXEC_ARGUMENTS
    )
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": ["bash", "-c", text, *_launcher(job)],
        "numNodes": job.max_nodes,
        "numProcPerNode": job.nproc,
        "env": _environment(job),
    }
    if resources := _resources(job):
        trainer["resourcesPerNode"] = resources
    pod: dict[str, Any] = {
        "volumes": _volumes(job),
        "containers": [{"name": "node", "volumeMounts": _mounts(job)}],
    }
    if version >= (2, 3):
        pod["terminationGracePeriodSeconds"] = job.save_s + 15
    if job.instance_type:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": job.instance_type}
    spec = {"runtimeRef": {"name": job.runtime}, "trainer": trainer, **_pod_overrides(version, pod)}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": spec,
    }


def _pod_overrides(version: Version, pod: dict[str, Any]) -> dict[str, Any]:
    """The field of a TrainJob that overrides the pods of its runtime."""
    targets = [{"name": "node"}]
    if version == (2, 0):
        return {"podSpecOverrides": [{"targetJobs": targets, **pod}]}
    if version == (2, 1):
        return {"podTemplateOverrides": [{"targetJobs": targets, "spec": pod}]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {
        "manager": "dynmo.launch/kubernetes",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }
    return {"runtimePatches": [patch]}


def indexed_job(job: KubernetesJob) -> list[dict[str, Any]]:
    """An indexed ``Job`` for a cluster without Kubeflow, and the headless service for the host names of its pods."""
    address = f"{job.job_name}-0.{job.job_name}"
    text = f'export NODE_RANK="$JOB_COMPLETION_INDEX" MASTER_ADDR="{address}" MASTER_PORT={PORT} && {_EXEC_ARGUMENTS}'
    container = _container(job, "dynmo", ["bash", "-c", text, *_launcher(job)])
    container["ports"] = [{"containerPort": PORT, "name": "rendezvous"}]
    pod = {**_training_pod(job, container), "restartPolicy": "OnFailure", "subdomain": job.job_name}
    spec = {
        "completionMode": "Indexed",
        "completions": job.max_nodes,
        "parallelism": job.max_nodes,
        "backoffLimit": job.max_restarts,
        "template": {"spec": pod},
    }
    if job.min_nodes != job.max_nodes:
        # Succeed with the first pod, without pods that have not started (Kubernetes 1.31 or newer).
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the rendezvous precedes readiness
            "selector": {"job-name": job.job_name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}]


def data_job(job: KubernetesJob) -> dict[str, Any]:
    """A ``Job`` that runs a command once, to download or prepare data."""
    container = _container(job, job.job_name, list(job.arguments))
    pod = {**_pod(job, container), "restartPolicy": "OnFailure"}
    spec = {"backoffLimit": job.max_restarts, "template": {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}


def volume_claim(claim: Claim, job: KubernetesJob) -> dict[str, Any]:
    """A volume claim to which all pods of a job can write."""
    spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": job.claim_size}}}
    if job.storage_class:
        spec["storageClassName"] = job.storage_class
    metadata = {"name": claim.name, "namespace": job.namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def to_yaml(documents: Sequence[dict[str, Any]], requirements: Sequence[Requirement] = ()) -> str:
    """The manifests as YAML, after comments with their requirements."""
    import yaml

    class DumperWithoutAnchors(yaml.SafeDumper):
        """Writes a repeated value twice: anchors confuse people and tools that edit manifests."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    head = "".join(f"# Requires {each.text}.\n" for each in requirements)
    return head + "---\n".join(
        yaml.dump(document, Dumper=DumperWithoutAnchors, sort_keys=False, width=120) for document in documents
    )


def served_version() -> Version | None:
    """The Kubernetes version of the cluster; None if ``kubectl`` does not report it."""
    done = subprocess.run(
        ["kubectl", "version", "-o", "json"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    try:
        found = parse_any_json(done.stdout)["serverVersion"]
        return parse_version("kubectl version", f"{found['major']}.{found['minor']}")
    except (ValueError, KeyError, TypeError, UsageError):
        return None


def apply(text: str, requirements: Sequence[Requirement] = ()) -> str:
    """Apply manifests with ``kubectl`` and return its output.

    Raises:
        UsageError: ``kubectl`` is not installed, or the cluster is older than the manifests require.
        DynmoError: the cluster rejected the manifests.
    """
    if shutil.which("kubectl") is None:
        raise UsageError("kubectl: not found on PATH; print the manifest with --dry-run and apply it on the cluster")
    if any(each.product == "Kubernetes" for each in requirements) and (version := served_version()) is not None:
        check_version(requirements, "Kubernetes", version, "the cluster's Kubernetes")
    done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        required = f"; it requires {' and '.join(each.text for each in requirements)}" if requirements else ""
        raise DynmoError(f"kubectl rejected the manifest: {done.stderr.strip()}{required}")
    return done.stdout.strip()


def manifests(job: KubernetesJob) -> tuple[str, list[Requirement]]:
    """The manifests of a job as YAML, and the versions that they require.

    Raises:
        UsageError: the cluster is older than the manifests require.
    """
    requirements_of: Mapping[ManifestKind, Callable[[KubernetesJob], list[Requirement]]] = {
        ManifestKind.PYTORCHJOB: pytorch_requirements,
        ManifestKind.TRAINJOB: trainer_requirements,
        ManifestKind.INDEXED: indexed_requirements,
    }
    requirements = requirements_of[job.kind](job) if job.kind in requirements_of else []
    if job.kubernetes_version is not None:
        option = "--kubernetes-version"
        check_version(requirements, "Kubernetes", parse_version(option, job.kubernetes_version), option)

    claims = [volume_claim(claim, job) for claim in job.claims if job.claim_size]
    objects = {
        ManifestKind.PYTORCHJOB: lambda: [pytorch_job(job)],
        ManifestKind.TRAINJOB: lambda: [train_job(job)],
        ManifestKind.INDEXED: lambda: indexed_job(job),
        ManifestKind.DATA: lambda: [data_job(job)],
    }[job.kind]()
    return to_yaml([*claims, *objects], requirements), requirements
