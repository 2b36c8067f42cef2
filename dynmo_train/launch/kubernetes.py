"""Kubernetes manifests: a training job for Kubeflow's operators, jobs for data, the volume claim; pure functions.

``PyTorchJob`` (kubeflow.org/v1) is the training operator's, ``TrainJob`` (trainer.kubeflow.org/v1alpha1) its
successor's; an indexed ``Job`` with a headless service needs no operator. In all, every pod runs one launcher; its
number and the address of the first come from the variables that the operator sets.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._common.document import parse_any_json
from .._common.errors import DynmoError, UsageError

PORT = 29500
Version = tuple[int, int]
# What each version of Kubeflow Trainer calls changes to a runtime's pods, from the Python models that it publishes
# (kubeflow_trainer_api). Each replaced the one before; only from 2.3 on may a pod's time to end be changed.
TRAINER_FORMS: Mapping[Version, str] = {
    (2, 0): "podSpecOverrides",
    (2, 1): "podTemplateOverrides",
    (2, 2): "runtimePatches",
    (2, 3): "runtimePatches with terminationGracePeriodSeconds",
}
# Of a pod that Kubernetes gives its usual 30 seconds to end.
USUAL_SAVE_S = 15
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?")
# Run by bash in the pod with the launcher's words as its arguments: nothing that a person gave is part of the text.
_BY_RANK = 'exec "$0" "$@"'


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A persistent volume claim and where it is mounted."""

    name: str
    path: str


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What runs: ``least`` to ``most`` pods of ``nproc`` processes with ``gpus`` devices each.

    A pod that is told to end has ``save_s`` seconds to save.
    """

    name: str
    image: str
    arguments: tuple[str, ...]
    least: int = 1
    most: int = 1
    nproc: int = 1
    gpus: int = 0
    efa: int = 0
    cpus: str = ""
    memory: str = ""
    instance_type: str = ""
    namespace: str = "default"
    claims: tuple[Claim, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    max_restarts: int = 3
    save_s: int = 60
    runtime: str = "torch-distributed"
    trainer: Version = (2, 3)

    def __post_init__(self) -> None:
        for option, value in (("--job-name", self.name), ("--namespace", self.namespace)):
            if not _NAME.fullmatch(value):
                raise UsageError(f"{option} must be small letters, digits and dashes, at most 53, is {value!r}")


def parse_claim(text: str) -> Claim:
    """``NAME:/PATH`` of ``--claim``."""
    name, colon, path = text.partition(":")
    if not colon or not _NAME.fullmatch(name) or not path.startswith("/"):
        raise UsageError(f"--claim takes NAME:/PATH, is {text!r}")
    return Claim(name=name, path=path)


def _resources(job: KubernetesJob) -> dict[str, Any]:
    devices: dict[str, Any] = {}
    if job.gpus:
        devices["nvidia.com/gpu"] = job.gpus
    if job.efa:
        devices["vpc.amazonaws.com/efa"] = job.efa
        devices["hugepages-2Mi"] = "5120Mi"
    asked = {name: value for name, value in (("cpu", job.cpus), ("memory", job.memory)) if value}
    return {"requests": {**asked, **devices}, "limits": {**asked, **devices}} if asked or devices else {}


def _mounts(job: KubernetesJob) -> list[dict[str, Any]]:
    # Shared memory: data loading and NCCL need more than the 64 MiB that a pod has by itself.
    own = [{"name": "shm", "mountPath": "/dev/shm"}]
    return [*own, *({"name": claim.name, "mountPath": claim.path} for claim in job.claims)]


def _volumes(job: KubernetesJob) -> list[dict[str, Any]]:
    own: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return [*own, *({"name": c.name, "persistentVolumeClaim": {"claimName": c.name}} for c in job.claims)]


def _environment(job: KubernetesJob) -> list[dict[str, str]]:
    fabric = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"} if job.efa else {}
    return [{"name": name, "value": value} for name, value in {**fabric, **job.environment}.items()]


def _pod(job: KubernetesJob, container: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [container], "volumes": _volumes(job)}
    if job.instance_type:
        spec["nodeSelector"] = {"node.kubernetes.io/instance-type": job.instance_type}
    return spec


def _training_pod(job: KubernetesJob, container: dict[str, Any]) -> dict[str, Any]:
    # The launcher, too, takes a moment to end after its processes.
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
class Need:
    """A field of a manifest, and the first version of a product that serves it."""

    product: str
    version: Version
    field: str

    @property
    def text(self) -> str:
        """For a person."""
        return f"{self.product} {self.version[0]}.{self.version[1]} or newer ({self.field})"


def parse_version(option: str, text: str) -> Version:
    """``1.31`` (also ``v1.31.2`` and ``1.31+``) as (1, 31); raises ``UsageError`` for anything else."""
    match = re.match(r"v?(\d+)\.(\d+)(?:[.+-].*)?$", text)
    if match is None:
        raise UsageError(f"{option} must be a version such as 1.31, is {text!r}")
    return int(match[1]), int(match[2])


def trainer_form(version: Version) -> Version:
    """The newest form of TrainJob that a version serves; raises ``UsageError`` below the first."""
    known = [form for form in TRAINER_FORMS if form <= version]
    if not known:
        found = f"{version[0]}.{version[1]}"
        raise UsageError(f"--trainer-version {found}: a TrainJob needs Kubeflow Trainer 2.0; use --kind pytorchjob")
    return max(known)


def indexed_needs(job: KubernetesJob) -> list[Need]:
    """What an indexed job needs of Kubernetes."""
    found = [Need(product="Kubernetes", version=(1, 24), field="Job.spec.completionMode Indexed")]
    if job.least != job.most:
        found.append(Need(product="Kubernetes", version=(1, 31), field="Job.spec.successPolicy"))
    return found


def pytorch_needs(job: KubernetesJob) -> list[Need]:
    """What a PyTorchJob needs of the training operator."""
    if job.least == job.most:
        return []
    return [Need(product="Kubeflow training operator", version=(1, 4), field="PyTorchJob.spec.elasticPolicy")]


def trainer_needs(job: KubernetesJob) -> list[Need]:
    """What a TrainJob needs of Kubeflow Trainer."""
    form = trainer_form(job.trainer)
    return [Need(product="Kubeflow Trainer", version=form, field=f"TrainJob.spec.{TRAINER_FORMS[form]}")]


def check_version(needs: Sequence[Need], product: str, version: Version, source: str) -> None:
    """Raise ``UsageError`` where a version of a product does not serve what a manifest has."""
    missing = [need for need in needs if need.product == product and need.version > version]
    if missing:
        found = f"{version[0]}.{version[1]}"
        raise UsageError(
            f"{source} {found}: the manifest needs {' and '.join(need.text for need in missing)}; give --nodes N, a"
            " fixed number, or --kind pytorchjob"
        )


def _launcher(job: KubernetesJob) -> list[str]:
    return [
        *("dynmo-train", "launch", "node", "--nproc", str(job.nproc), "--nnodes", f"{job.least}:{job.most}"),
        *("--job", job.name, "--max-restarts", str(job.max_restarts)),
        *("--save-s", str(job.save_s), "--", *job.arguments),
    ]


def _metadata(job: KubernetesJob) -> dict[str, Any]:
    return {"name": job.name, "namespace": job.namespace}


def pytorch_job(job: KubernetesJob) -> dict[str, Any]:
    """The ``PyTorchJob``: a master and its workers, also where their number may change.

    A pod that ends with 0 is complete: the others go on, and its node is free. The job has succeeded when its master
    has; of workers alone the training operator calls an elastic job done as soon as one of them is (UpdateJobStatus in
    its pytorchjob_controller.go, release 1.9), so a released one would end the job for it. What has not come by then
    is removed (``cleanPodPolicy``).
    """
    elastic = job.least != job.most
    text = f'export NODE_RANK="$RANK" MASTER_ADDR="$MASTER_ADDR" MASTER_PORT={PORT} && {_BY_RANK}'
    container = _container(job, "pytorch", ["bash", "-c", text, *_launcher(job)])
    container["ports"] = [{"containerPort": PORT, "name": "pytorchjob-port"}]

    def replicas(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": _training_pod(job, container)}}

    policy: dict[str, Any] = {"cleanPodPolicy": "Running" if elastic else "None", "backoffLimit": job.max_restarts}
    spec: dict[str, Any] = {"runPolicy": policy}
    if elastic:
        policy["schedulingPolicy"] = {"minAvailable": job.least}
        spec["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "minReplicas": job.least,
            "maxReplicas": job.most,
            "maxRestarts": job.max_restarts,
        }
    workers = {"Worker": replicas(job.most - 1)} if job.most > 1 else {}
    spec["pytorchReplicaSpecs"] = {"Master": replicas(1), **workers}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _metadata(job), "spec": spec}


def usable_save_s(job: KubernetesJob) -> int:
    """The seconds to save in of a TrainJob: below Trainer 2.3 pods have the time to end that their runtime gives."""
    return job.save_s if trainer_form(job.trainer) >= (2, 3) else min(job.save_s, USUAL_SAVE_S)


def train_job(job: KubernetesJob) -> dict[str, Any]:
    """The ``TrainJob`` of Kubeflow Trainer 2, on a cluster's training runtime, in the form of ``job.trainer``."""
    form = trainer_form(job.trainer)
    job = replace(job, save_s=usable_save_s(job))
    text = (
        'export NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT" && ' + _BY_RANK
    )
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": ["bash", "-c", text, *_launcher(job)],
        "numNodes": job.most,
        "numProcPerNode": job.nproc,
        "env": _environment(job),
    }
    if resources := _resources(job):
        trainer["resourcesPerNode"] = resources
    pod: dict[str, Any] = {
        "volumes": _volumes(job),
        "containers": [{"name": "node", "volumeMounts": _mounts(job)}],
    }
    if form >= (2, 3):
        pod["terminationGracePeriodSeconds"] = job.save_s + 15
    if job.instance_type:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": job.instance_type}
    spec = {"runtimeRef": {"name": job.runtime}, "trainer": trainer, **_changed_pods(form, pod)}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": spec,
    }


def _changed_pods(form: Version, pod: dict[str, Any]) -> dict[str, Any]:
    """The field of a TrainJob that changes the pods of its runtime."""
    targets = [{"name": "node"}]
    if form == (2, 0):
        return {"podSpecOverrides": [{"targetJobs": targets, **pod}]}
    if form == (2, 1):
        return {"podTemplateOverrides": [{"targetJobs": targets, "spec": pod}]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {
        "manager": "dynmo.launch/kubernetes",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }
    return {"runtimePatches": [patch]}


def indexed_job(job: KubernetesJob) -> list[dict[str, Any]]:
    """A ``Job`` of numbered pods, for a cluster without Kubeflow, and the headless service that gives them names."""
    address = f"{job.name}-0.{job.name}"
    text = f'export NODE_RANK="$JOB_COMPLETION_INDEX" MASTER_ADDR="{address}" MASTER_PORT={PORT} && {_BY_RANK}'
    container = _container(job, "dynmo", ["bash", "-c", text, *_launcher(job)])
    container["ports"] = [{"containerPort": PORT, "name": "meeting"}]
    pod = {**_training_pod(job, container), "restartPolicy": "OnFailure", "subdomain": job.name}
    spec = {
        "completionMode": "Indexed",
        "completions": job.most,
        "parallelism": job.most,
        "backoffLimit": job.max_restarts,
        "template": {"spec": pod},
    }
    if job.least != job.most:
        # Pods that have not come when the first is done are not waited for (Kubernetes 1.31 or newer).
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the nodes meet before any of them is ready
            "selector": {"job-name": job.name},
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}]


def data_job(job: KubernetesJob) -> dict[str, Any]:
    """A plain ``Job`` that runs the command itself once: fetching or preparing data."""
    container = _container(job, job.name, list(job.arguments))
    pod = {**_pod(job, container), "restartPolicy": "OnFailure"}
    spec = {"backoffLimit": job.max_restarts, "template": {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}


def volume_claim(claim: Claim, namespace: str, size: str, storage_class: str) -> dict[str, Any]:
    """A claim that all pods write to."""
    spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    metadata = {"name": claim.name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def to_yaml(documents: Sequence[dict[str, Any]], needs: Sequence[Need] = ()) -> str:
    """The manifests as one YAML text, which begins with what they need."""
    import yaml

    class Plain(yaml.SafeDumper):
        """Writes a value that stands in two places twice: anchors confuse people and tools that edit manifests."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    head = "".join(f"# Needs {need.text}.\n" for need in needs)
    return head + "---\n".join(yaml.dump(document, Dumper=Plain, sort_keys=False, width=120) for document in documents)


def served_version() -> Version | None:
    """The version of the cluster's Kubernetes; None where ``kubectl`` does not report it."""
    done = subprocess.run(
        ["kubectl", "version", "-o", "json"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    try:
        found = parse_any_json(done.stdout)["serverVersion"]
        return parse_version("kubectl version", f"{found['major']}.{found['minor']}")
    except (ValueError, KeyError, TypeError, UsageError):
        return None


def apply(text: str, needs: Sequence[Need] = ()) -> str:
    """Submit manifests with ``kubectl``; what it says.

    Raises:
        UsageError: there is no ``kubectl`` here, or the cluster's Kubernetes is older than the manifests need.
        DynmoError: the cluster refuses them.
    """
    if shutil.which("kubectl") is None:
        raise UsageError("kubectl is not on PATH; write the manifest with --dry-run and apply it there")
    if any(need.product == "Kubernetes" for need in needs) and (version := served_version()) is not None:
        check_version(needs, "Kubernetes", version, "the cluster's Kubernetes")
    done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        needed = f"; it needs {' and '.join(need.text for need in needs)}" if needs else ""
        raise DynmoError(f"kubectl refuses the manifest: {done.stderr.strip()}{needed}")
    return done.stdout.strip()
