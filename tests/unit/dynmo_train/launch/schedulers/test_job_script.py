"""Batch scripts, hostfiles and manifests: quoting, sizes from the environment, host filters, schemas."""

from __future__ import annotations

import subprocess

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.launch.schedulers.hostfile import (
    Host,
    HostfileOptions,
    HostJob,
    filter_hosts,
    forwarded_environment,
    host_command,
    parse_hostfile,
)
from dynmo_train.launch.schedulers.job_script import (
    SIZE_VARIABLES,
    bash_array,
    parse_exports,
    shell_words,
    task_cpus,
    with_environment,
)
from dynmo_train.launch.schedulers.kubernetes import (
    Claim,
    KubernetesJob,
    check_version,
    data_job,
    indexed_job,
    indexed_requirements,
    parse_claim,
    parse_version,
    pytorch_job,
    pytorch_requirements,
    to_yaml,
    train_job,
    trainer_requirements,
    volume_claim,
)
from dynmo_train.launch.schedulers.lsf import LsfJob, lsf_script
from dynmo_train.launch.schedulers.slurm import HetGroup, SlurmJob, parse_het_group, slurm_script

HOSTILE = 'a b\'; touch broken; $(touch broken) `touch broken` "x"'
COMMAND = ("pretrain", "gpt", "--num-layers", "24", "--hidden-size=512", "--data-path", HOSTILE)


def words_in_bash(text, name="command", **environment):
    """The elements of an array after a text has been run by bash."""
    show = f'{text}\nprintf "%s\\0" "${{{name}[@]}}"'
    done = subprocess.run(["bash", "-uc", show], capture_output=True, text=True, check=True, env={**environment})
    return done.stdout.split("\0")[:-1]


def test_shell_words_reach_the_command_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = ["pretrain", "gpt", "--num-layers", "24", "--hidden-size", "512", "--data-path", HOSTILE]
    text = bash_array("command", shell_words(COMMAND))
    assert words_in_bash(text) == plain
    sized = words_in_bash(text, NUM_LAYERS="64", TENSOR_PARALLEL="8", HIDDEN_SIZE="$(touch broken)")
    assert sized == [
        *plain[:3],
        "64",
        "--hidden-size",
        "$(touch broken)",
        *plain[6:],
        "--tensor-model-parallel-size",
        "8",
    ]
    assert not list(tmp_path.iterdir())


def test_with_environment_sizes_override_arguments():
    assert with_environment(COMMAND, {"NUM_LAYERS": "64", "SEQ_LENGTH": "9", "OTHER": "1"}) == (
        *("pretrain", "gpt", "--num-layers", "64", "--hidden-size", "512", "--data-path", HOSTILE),
        *("--seq-length", "9"),
    )
    assert with_environment(("generate", "--x"), dict.fromkeys(SIZE_VARIABLES, "1")) == ("generate", "--x")


def slurm(**changes):
    return SlurmJob(**{"arguments": COMMAND, "job_name": "big", "nodes": "2:4", "nproc": 8} | changes)


def test_slurm_script_has_the_given_options():
    script = slurm_script(
        slurm(
            gpus=8,
            cpus=96,
            time_limit="4:00:00",
            partition="p5",
            account="us",
            array=3,
            save_before_s=300,
            image="/fsx/dynmo.sqsh",
            mount=["/fsx:/fsx", "/scratch:/scratch"],
            export=[f"NCCL_DEBUG={HOSTILE}"],
            sbatch=["--exclusive", "--mem=0"],
        )
    )
    for line in (
        "#SBATCH --nodes=2-4",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=96",
        "#SBATCH --time=4:00:00",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --array=1-3%1",
        "#SBATCH --requeue",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        "  --container-image=/fsx/dynmo.sqsh",
        "  --container-mounts=/fsx:/fsx,/scratch:/scratch",
        '  --nnodes "2:${#hosts[@]}"',
    ):
        assert line in script.splitlines()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_slurm_script_heterogeneous_job_has_a_group_each():
    script = slurm_script(slurm(het=["2:a100:8", "1:h100:4"]))
    head = script.split("\n\n")[0]
    assert head.index("--partition=a100") < head.index("#SBATCH hetjob") < head.index("--partition=h100")
    assert "SLURM_JOB_NODELIST_HET_GROUP_1" in script
    assert "--het-group=0-1" in script
    assert parse_het_group("2:a") == HetGroup(nodes=2, partition="a", gpus=0)
    for bad in ("a", "0:x", "2:", "1:a:b", "1:a:2:3"):
        with pytest.raises(UsageError, match=r"--het .* must"):
            parse_het_group(bad)


@pytest.mark.parametrize("field", ["partition", "account", "time_limit", "image", "log_dir"])
def test_slurm_script_value_with_newline_is_refused(field):
    with pytest.raises(UsageError, match="must not have blanks"):
        slurm_script(slurm(**{field: "x\n#SBATCH --wrap=evil"}))


def test_lsf_script_image_wraps_the_command():
    job = LsfJob(
        arguments=COMMAND,
        job_name="cc",
        nodes=4,
        nproc=8,
        gpus=8,
        time_limit="24:00",
        queue="normal",
        image="/images/dynmo.sif",
        mount=["/data:/data"],
        container="apptainer",
    )
    script = lsf_script(job)
    assert '#BSUB -gpu "num=8/host"\n' in script
    assert "#BSUB -q normal\n" in script
    container = script[script.index("container=(") : script.index("command=(")]
    assert words_in_bash(container, "container") == [
        *("apptainer", "exec", "--nv", "--bind=/data:/data", "/images/dynmo.sif")
    ]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_filter_hosts_include_and_exclude_select_slots():
    text = "# ours\nalpha slots=4\n\nbeta slots=2 # old\n"
    hosts = parse_hostfile(text, "hosts")
    assert hosts == [Host(name="alpha", slots=(0, 1, 2, 3)), Host(name="beta", slots=(0, 1))]
    assert filter_hosts(hosts, None, None) == hosts
    assert filter_hosts(hosts, "beta@alpha:3,1", None) == [
        Host(name="alpha", slots=(1, 3)),
        Host(name="beta", slots=(0, 1)),
    ]
    assert filter_hosts(hosts, None, "alpha@beta:0") == [Host(name="beta", slots=(1,))]


@pytest.mark.parametrize(
    ("include", "exclude", "words"),
    [
        ("alpha", "beta", "cannot be combined"),
        ("gamma", None, "'gamma': must be a host of the hostfile: alpha, beta"),
        ("alpha:9", None, "slot 9 of alpha: must be from 0 to 3"),
        ("alpha:x", None, "must be HOST or HOST:SLOT,SLOT"),
        (None, "alpha@beta", "must leave at least one slot"),
    ],
)
def test_filter_hosts_invalid_filter_is_refused(include, exclude, words):
    with pytest.raises(UsageError, match=words):
        filter_hosts(parse_hostfile("alpha slots=4\nbeta slots=2", "hosts"), include, exclude)


def test_parse_hostfile_reports_every_invalid_line():
    with pytest.raises(UsageError) as caught:
        parse_hostfile("alpha slots=4\nalpha slots=1\nbeta\n-oProxyCommand=x slots=1\ngamma slots=0\n", "hosts")
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["2", "3", "4", "5"]
    with pytest.raises(UsageError, match="must have at least one"):
        parse_hostfile("# nothing\n", "hosts")


def test_host_command_remote_line_is_quoted_twice():
    job = HostJob(
        options=HostfileOptions(
            arguments=COMMAND,
            log_dir="my logs",
            min_nodes=1,
            master_addr="10.0.0.1",
            master_port=6000,
            ssh="ssh -p 2222",
        ),
        hosts=(Host(name="alpha", slots=(1, 3)), Host(name="beta", slots=(0,))),
        environment={"NCCL_DEBUG": HOSTILE},
        folder="/shared/my run",
        program=("printf", "%s\\0"),
    )
    *ssh, line = host_command(job, 0)
    assert ssh == ["ssh", "-p", "2222", "alpha"]
    line = line.replace("cd '/shared/my run'", "cd /")
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    output = done.stdout.split("\0")
    assert output[-len(COMMAND) - 1 : -1] == list(COMMAND)
    assert "1:2" in output
    assert "CUDA_VISIBLE_DEVICES=1,3" in line
    assert "--node-rank 1" in host_command(job, 1)[-1]


def test_forwarded_environment_selects_variables():
    here = {"NCCL_DEBUG": "INFO", "PATH": "/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": "x"}
    assert forwarded_environment(here, {"MINE": "1"}) == {
        "MINE": "1",
        "NCCL_DEBUG": "INFO",
        "PATH": "/bin",
        "PYTHONPATH": "x",
    }


def kubernetes(**changes):
    values = {
        **{
            "job_name": "big",
            "image": "registry/dynmo:1",
            "arguments": COMMAND,
            "nodes": "4",
            "nproc": 8,
        },
        **{"gpus": 8, "efa": 32, "cpus": "90", "memory": "800Gi", "instance_type": "p5.48xlarge"},
        **{"claim": ["fsx:/fsx"], "claim_size": "1200Gi", "export": ["HF_HOME=/fsx/hf"]},
    }
    return KubernetesJob(**values | changes)


def test_pytorch_job_has_a_master_and_workers():
    fixed = pytorch_job(kubernetes())["spec"]
    assert {name: one["replicas"] for name, one in fixed["pytorchReplicaSpecs"].items()} == {"Master": 1, "Worker": 3}
    elastic = pytorch_job(kubernetes(nodes="2:4"))["spec"]
    assert elastic["elasticPolicy"]["minReplicas"] == 2
    # With a master, a worker that is complete does not make the job of an elastic policy "Succeeded".
    assert {name: one["replicas"] for name, one in elastic["pytorchReplicaSpecs"].items()} == {"Master": 1, "Worker": 3}
    assert elastic["runPolicy"]["schedulingPolicy"]["minAvailable"] == 2
    alone = pytorch_job(kubernetes(nodes="1"))["spec"]["pytorchReplicaSpecs"]
    assert list(alone) == ["Master"]
    container = fixed["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == 32
    assert container["command"][-len(COMMAND) :] == list(COMMAND)
    done = subprocess.run(
        [*container["command"][:2], container["command"][2].replace("exec", "echo $NODE_RANK $MASTER_ADDR;"), "true"],
        env={"RANK": "3", "MASTER_ADDR": "big-master-0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "3 big-master-0\n"


# The fields of the custom resource of the training operator 1.9 (manifests/base/crds/kubeflow.org_pytorchjobs.yaml).
PYTORCHJOB_FIELDS = {
    "": {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"},
    "elasticPolicy": {
        *("maxReplicas", "maxRestarts", "metrics", "minReplicas", "nProcPerNode", "rdzvBackend", "rdzvConf"),
        *("rdzvHost", "rdzvId", "rdzvPort", "standalone"),
    },
    "runPolicy": {
        *("activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy", "suspend"),
        "ttlSecondsAfterFinished",
    },
    "schedulingPolicy": {"minAvailable", "minResources", "priorityClass", "queue", "scheduleTimeoutSeconds"},
    "replica": {"replicas", "restartPolicy", "template"},
}


@pytest.mark.parametrize("nodes", ["1:4", "4"])
def test_pytorch_job_has_fields_of_its_custom_resource(nodes):
    spec = pytorch_job(kubernetes(nodes=nodes))["spec"]
    assert spec.keys() <= PYTORCHJOB_FIELDS[""]
    assert spec.get("elasticPolicy", {}).keys() <= PYTORCHJOB_FIELDS["elasticPolicy"]
    assert spec["runPolicy"].keys() <= PYTORCHJOB_FIELDS["runPolicy"]
    assert spec["runPolicy"].get("schedulingPolicy", {}).keys() <= PYTORCHJOB_FIELDS["schedulingPolicy"]
    for replica in spec["pytorchReplicaSpecs"].values():
        assert replica.keys() == PYTORCHJOB_FIELDS["replica"]
        # The webhook of the operator wants one of this name, and its services the port of this name.
        (container,) = replica["template"]["spec"]["containers"]
        assert (container["name"], container["ports"][0]["name"]) == ("pytorch", "pytorchjob-port")


def test_manifests_match_the_published_schemas():
    validate = pytest.importorskip("kubernetes_validate").validate
    claim = volume_claim(Claim(name="fsx", path="/fsx"), kubernetes(storage_class="fsx-sc"))
    documents = [claim, *indexed_job(kubernetes()), *indexed_job(kubernetes(nodes="2:4")), data_job(kubernetes())]
    for job in (pytorch_job(kubernetes()), pytorch_job(kubernetes(nodes="2:4"))):
        for replica in job["spec"]["pytorchReplicaSpecs"].values():
            spec = replica["template"]["spec"] | {"restartPolicy": replica["restartPolicy"]}
            documents.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    for document in documents:
        validate(document, "1.31", strict=True)


def test_train_job_matches_the_models_of_kubeflow():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    document = train_job(kubernetes())
    parsed = models.TrainerV1alpha1TrainJob.from_dict(document).to_dict()
    assert {name: parsed[name] for name in document} == document


# The fields by which kubeflow_trainer_api 2.0.0, 2.1.0 and 2.2.0 change a runtime's pods (its Python models).
POD_FIELDS = {"containers", "initContainers", "nodeSelector", "schedulingGates", "serviceAccountName", "tolerations"}
POD_FIELDS |= {"volumes"}


@pytest.mark.parametrize(
    ("version", "field", "pod_of"),
    [
        ("2.0", "podSpecOverrides", lambda change: {k: v for k, v in change.items() if k != "targetJobs"}),
        ("2.1", "podTemplateOverrides", lambda change: change["spec"]),
        (
            "2.2",
            "runtimePatches",
            lambda change: change["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"][
                "template"
            ]["spec"],
        ),
    ],
)
def test_train_job_older_trainer_has_its_fields(version, field, pod_of):
    spec = train_job(kubernetes(trainer_version=version))["spec"]
    assert spec.keys() == {"runtimeRef", "trainer", field}
    (change,) = spec[field]
    assert pod_of(change).keys() <= POD_FIELDS
    if version < "2.2":
        assert change["targetJobs"] == [{"name": "node"}]
    # Its pods have 30 s to end, and the launcher needs a part of that.
    command = spec["trainer"]["command"]
    assert command[command.index("--save-s") + 1] == "15"


def test_check_version_older_cluster_is_refused():
    fixed, elastic = indexed_requirements(kubernetes()), indexed_requirements(kubernetes(nodes="2:4"))
    assert [each.text for each in fixed] == ["Kubernetes 1.24 or newer (Job.spec.completionMode Indexed)"]
    check_version(fixed, "Kubernetes", (1, 30), "--kubernetes-version")
    check_version(elastic, "Kubernetes", (1, 31), "--kubernetes-version")
    with pytest.raises(UsageError, match=r"--kubernetes-version 1\.30: .* Kubernetes 1\.31 .*successPolicy"):
        check_version(elastic, "Kubernetes", (1, 30), "--kubernetes-version")
    with pytest.raises(UsageError, match=r"must be 2\.0 or newer"):
        train_job(kubernetes(trainer_version="1.9"))
    assert [each.version for each in trainer_requirements(kubernetes(trainer_version="2.9"))] == [(2, 3)]
    assert pytorch_requirements(kubernetes()) == []
    assert [each.version for each in pytorch_requirements(kubernetes(nodes="2:4"))] == [(1, 4)]


@pytest.mark.parametrize("text", ["1.31", "v1.31.4", "1.31+", "1.31-eks-1"])
def test_parse_version_server_formats_are_accepted(text):
    assert parse_version("--kubernetes-version", text) == (1, 31)
    with pytest.raises(UsageError, match="such as"):
        parse_version("--kubernetes-version", "latest")


def test_to_yaml_starts_with_requirements_without_anchors():
    text = to_yaml([pytorch_job(kubernetes(nodes="2:4"))], pytorch_requirements(kubernetes(nodes="2:4")))
    assert text.startswith("# Requires Kubeflow training operator 1.4 or newer (PyTorchJob.spec.elasticPolicy).\n")
    assert not [line for line in text.splitlines() if "&id" in line or "*id" in line]


@pytest.mark.parametrize(
    ("gpus", "arguments", "environment", "cpus"),
    [
        (8, COMMAND, {}, 32),
        (0, COMMAND, {}, 8),
        (0, (*COMMAND, "--num-threads", "3"), {}, 24),
        (8, (*COMMAND, "--num-threads=6"), {}, 48),
        (0, (*COMMAND, "--num_threads", "3"), {}, 24),
        (0, (*COMMAND, "--num_threads=3"), {}, 24),
        (0, COMMAND, {"OMP_NUM_THREADS": "2"}, 16),
    ],
)
def test_task_cpus_cover_all_processes(gpus, arguments, environment, cpus):
    assert task_cpus(8, gpus, arguments, environment) == cpus


def test_lsf_script_slots_are_per_host():
    script = lsf_script(LsfJob(arguments=COMMAND, job_name="big", nodes=2, nproc=8, gpus=8, cpus=32))
    assert {"#BSUB -n 64", '#BSUB -R "span[ptile=32]"'} <= set(script.splitlines())


def test_to_yaml_writes_several_documents():
    import yaml

    documents = [*indexed_job(kubernetes()), data_job(kubernetes(job_name="prep"))]
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


@pytest.mark.parametrize("bad", ["fsx", "fsx:data", "Fsx:/x", ":/x"])
def test_parse_claim_invalid_claim_is_refused(bad):
    with pytest.raises(UsageError, match="NAME:/PATH"):
        parse_claim(bad)


def test_kubernetes_job_invalid_name_or_export_is_refused():
    with pytest.raises(UsageError, match=r"--job-name .*lowercase"):
        kubernetes(job_name="Big Job")
    assert parse_exports(["A=b=c"]) == {"A": "b=c"}
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_exports(["A B=c"])
