"""What the launchers of clusters write: quoting, sizes from the environment, filters of hosts, valid manifests."""

from __future__ import annotations

import subprocess

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.launch.hostfile import Host, HostJob, carried, choose, host_command, parse_hostfile
from dynmo_train.launch.job_script import SIZE_VARIABLES, array, parse_exports, shell_words, task_cpus, with_environment
from dynmo_train.launch.kubernetes import (
    Claim,
    KubernetesJob,
    check_version,
    data_job,
    indexed_job,
    indexed_needs,
    parse_claim,
    parse_version,
    pytorch_job,
    pytorch_needs,
    to_yaml,
    train_job,
    trainer_needs,
    volume_claim,
)
from dynmo_train.launch.lsf import LsfJob, lsf_script
from dynmo_train.launch.slurm import Part, SlurmJob, parse_part, slurm_script

HOSTILE = 'a b\'; touch broken; $(touch broken) `touch broken` "x"'
COMMAND = ("pretrain", "gpt", "--num-layers", "24", "--hidden-size=512", "--data-path", HOSTILE)


def words_in_bash(text, name="command", **environment):
    """The elements of an array after a text has been run by bash."""
    show = f'{text}\nprintf "%s\\0" "${{{name}[@]}}"'
    told = subprocess.run(["bash", "-uc", show], capture_output=True, text=True, check=True, env={**environment})
    return told.stdout.split("\0")[:-1]


def test_words_reach_the_command_as_they_were_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = ["pretrain", "gpt", "--num-layers", "24", "--hidden-size", "512", "--data-path", HOSTILE]
    text = array("command", shell_words(COMMAND))
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


def test_the_same_rule_without_a_shell():
    assert with_environment(COMMAND, {"NUM_LAYERS": "64", "SEQ_LENGTH": "9", "OTHER": "1"}) == (
        *("pretrain", "gpt", "--num-layers", "64", "--hidden-size", "512", "--data-path", HOSTILE),
        *("--seq-length", "9"),
    )
    assert with_environment(("generate", "--x"), dict.fromkeys(SIZE_VARIABLES, "1")) == ("generate", "--x")


def slurm(**changes):
    return SlurmJob(**{"arguments": COMMAND, "name": "big", "least": 2, "most": 4, "nproc": 8} | changes)


def test_a_slurm_script_asks_for_what_was_given():
    script = slurm_script(
        slurm(
            gpus=8,
            cpus=96,
            time="4:00:00",
            partition="p5",
            account="us",
            array=3,
            save_before_s=300,
            image="/fsx/dynmo.sqsh",
            mounts=("/fsx:/fsx", "/scratch:/scratch"),
            exports={"NCCL_DEBUG": HOSTILE},
            more=("--exclusive", "--mem=0"),
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


def test_a_heterogeneous_job_has_a_group_for_each_part():
    script = slurm_script(slurm(parts=(parse_part("2:a100:8"), parse_part("1:h100:4"))))
    head = script.split("\n\n")[0]
    assert head.index("--partition=a100") < head.index("#SBATCH hetjob") < head.index("--partition=h100")
    assert "SLURM_JOB_NODELIST_HET_GROUP_1" in script
    assert "--het-group=0-1" in script
    assert parse_part("2:a") == Part(nodes=2, partition="a", gpus=0)
    for bad in ("a", "0:x", "2:", "1:a:b", "1:a:2:3"):
        with pytest.raises(UsageError, match="--het takes"):
            parse_part(bad)


@pytest.mark.parametrize("field", ["partition", "account", "time", "image", "log_dir"])
def test_a_value_cannot_become_another_option(field):
    with pytest.raises(UsageError, match="no blanks, quotes"):
        slurm_script(slurm(**{field: "x\n#SBATCH --wrap=evil"}))


def test_an_lsf_script_runs_in_the_image():
    job = LsfJob(
        arguments=COMMAND,
        name="cc",
        nodes=4,
        nproc=8,
        gpus=8,
        time="24:00",
        queue="normal",
        image="/images/dynmo.sif",
        mounts=("/data:/data",),
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


def test_hosts_and_their_filters():
    text = "# ours\nalpha slots=4\n\nbeta slots=2 # old\n"
    hosts = parse_hostfile(text, "hosts")
    assert hosts == [Host(name="alpha", slots=(0, 1, 2, 3)), Host(name="beta", slots=(0, 1))]
    assert choose(hosts, None, None) == hosts
    assert choose(hosts, "beta@alpha:3,1", None) == [Host(name="alpha", slots=(1, 3)), Host(name="beta", slots=(0, 1))]
    assert choose(hosts, None, "alpha@beta:0") == [Host(name="beta", slots=(1,))]


@pytest.mark.parametrize(
    ("include", "exclude", "words"),
    [
        ("alpha", "beta", "not both"),
        ("gamma", None, "'gamma' is not in the hostfile, which has alpha, beta"),
        ("alpha:9", None, "alpha has the slots 0 to 3, not 9"),
        ("alpha:x", None, "is not HOST or HOST:SLOT,SLOT"),
        (None, "alpha@beta", "leaves no host"),
    ],
)
def test_wrong_filters_are_told(include, exclude, words):
    with pytest.raises(UsageError, match=words):
        choose(parse_hostfile("alpha slots=4\nbeta slots=2", "hosts"), include, exclude)


def test_every_bad_line_of_a_hostfile_is_told():
    with pytest.raises(UsageError) as told:
        parse_hostfile("alpha slots=4\nalpha slots=1\nbeta\n-oProxyCommand=x slots=1\ngamma slots=0\n", "hosts")
    assert [line.split(":")[1] for line in str(told.value).splitlines()] == ["2", "3", "4", "5"]
    with pytest.raises(UsageError, match="names no host"):
        parse_hostfile("# nothing\n", "hosts")


def test_the_line_for_another_host_is_quoted_twice():
    job = HostJob(
        hosts=(Host(name="alpha", slots=(1, 3)), Host(name="beta", slots=(0,))),
        arguments=COMMAND,
        options=("--log-dir", "my logs"),
        environment={"NCCL_DEBUG": HOSTILE},
        folder="/shared/my run",
        least=1,
        master_addr="10.0.0.1",
        master_port=6000,
        ssh=("ssh", "-p", "2222"),
        program=("printf", "%s\\0"),
        devices=True,
    )
    *ssh, line = host_command(job, 0)
    assert ssh == ["ssh", "-p", "2222", "alpha"]
    line = line.replace("cd '/shared/my run'", "cd /")
    told = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout.split("\0")
    assert told[-len(COMMAND) - 1 : -1] == list(COMMAND)
    assert "1:2" in told
    assert "CUDA_VISIBLE_DEVICES=1,3" in line
    assert "--node-rank 1" in host_command(job, 1)[-1]


def test_what_goes_along_to_other_hosts():
    here = {"NCCL_DEBUG": "INFO", "PATH": "/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": "x"}
    assert carried(here, {"MINE": "1"}) == {"MINE": "1", "NCCL_DEBUG": "INFO", "PATH": "/bin", "PYTHONPATH": "x"}


def kubernetes(**changes):
    values = {
        **{"name": "big", "image": "registry/dynmo:1", "arguments": COMMAND, "least": 4, "most": 4, "nproc": 8},
        **{"gpus": 8, "efa": 32, "cpus": "90", "memory": "800Gi", "instance_type": "p5.48xlarge"},
        **{"claims": (Claim(name="fsx", path="/fsx"),), "environment": {"HF_HOME": "/fsx/hf"}},
    }
    return KubernetesJob(**values | changes)


def test_a_pytorchjob_has_a_master_and_workers():
    fixed = pytorch_job(kubernetes())["spec"]
    assert {name: one["replicas"] for name, one in fixed["pytorchReplicaSpecs"].items()} == {"Master": 1, "Worker": 3}
    elastic = pytorch_job(kubernetes(least=2))["spec"]
    assert elastic["elasticPolicy"]["minReplicas"] == 2
    # With a master, a worker that is complete does not make the job of an elastic policy "Succeeded".
    assert {name: one["replicas"] for name, one in elastic["pytorchReplicaSpecs"].items()} == {"Master": 1, "Worker": 3}
    assert elastic["runPolicy"]["schedulingPolicy"]["minAvailable"] == 2
    alone = pytorch_job(kubernetes(least=1, most=1))["spec"]["pytorchReplicaSpecs"]
    assert list(alone) == ["Master"]
    container = fixed["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == 32
    assert container["command"][-len(COMMAND) :] == list(COMMAND)
    told = subprocess.run(
        [*container["command"][:2], container["command"][2].replace("exec", "echo $NODE_RANK $MASTER_ADDR;"), "true"],
        env={"RANK": "3", "MASTER_ADDR": "big-master-0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "3 big-master-0\n"


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


@pytest.mark.parametrize("least", [1, 4])
def test_a_pytorchjob_has_the_fields_of_its_custom_resource(least):
    spec = pytorch_job(kubernetes(least=least))["spec"]
    assert spec.keys() <= PYTORCHJOB_FIELDS[""]
    assert spec.get("elasticPolicy", {}).keys() <= PYTORCHJOB_FIELDS["elasticPolicy"]
    assert spec["runPolicy"].keys() <= PYTORCHJOB_FIELDS["runPolicy"]
    assert spec["runPolicy"].get("schedulingPolicy", {}).keys() <= PYTORCHJOB_FIELDS["schedulingPolicy"]
    for replica in spec["pytorchReplicaSpecs"].values():
        assert replica.keys() == PYTORCHJOB_FIELDS["replica"]
        # The webhook of the operator wants one of this name, and its services the port of this name.
        (container,) = replica["template"]["spec"]["containers"]
        assert (container["name"], container["ports"][0]["name"]) == ("pytorch", "pytorchjob-port")


def test_manifests_keep_to_the_published_schemas():
    validate = pytest.importorskip("kubernetes_validate").validate
    claim = volume_claim(Claim(name="fsx", path="/fsx"), "default", "1200Gi", "fsx-sc")
    documents = [claim, *indexed_job(kubernetes()), *indexed_job(kubernetes(least=2)), data_job(kubernetes())]
    for job in (pytorch_job(kubernetes()), pytorch_job(kubernetes(least=2))):
        for replica in job["spec"]["pytorchReplicaSpecs"].values():
            spec = replica["template"]["spec"] | {"restartPolicy": replica["restartPolicy"]}
            documents.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    for document in documents:
        validate(document, "1.31", strict=True)


def test_a_trainjob_is_one_for_kubeflows_own_models():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    document = train_job(kubernetes())
    again = models.TrainerV1alpha1TrainJob.from_dict(document).to_dict()
    assert {name: again[name] for name in document} == document


# The fields by which kubeflow_trainer_api 2.0.0, 2.1.0 and 2.2.0 change a runtime's pods (its Python models).
POD_FIELDS = {"containers", "initContainers", "nodeSelector", "schedulingGates", "serviceAccountName", "tolerations"}
POD_FIELDS |= {"volumes"}


@pytest.mark.parametrize(
    ("version", "field", "pod_of"),
    [
        ((2, 0), "podSpecOverrides", lambda change: {k: v for k, v in change.items() if k != "targetJobs"}),
        ((2, 1), "podTemplateOverrides", lambda change: change["spec"]),
        (
            (2, 2),
            "runtimePatches",
            lambda change: change["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"][
                "template"
            ]["spec"],
        ),
    ],
)
def test_a_trainjob_for_an_older_trainer_has_its_fields(version, field, pod_of):
    spec = train_job(kubernetes(trainer=version))["spec"]
    assert spec.keys() == {"runtimeRef", "trainer", field}
    (change,) = spec[field]
    assert pod_of(change).keys() <= POD_FIELDS
    if version < (2, 2):
        assert change["targetJobs"] == [{"name": "node"}]
    # Its pods have 30 s to end, and the launcher needs a part of that.
    command = spec["trainer"]["command"]
    assert command[command.index("--save-s") + 1] == "15"


def test_manifests_need_versions_that_the_cluster_has():
    fixed, elastic = indexed_needs(kubernetes()), indexed_needs(kubernetes(least=2))
    assert [need.text for need in fixed] == ["Kubernetes 1.24 or newer (Job.spec.completionMode Indexed)"]
    check_version(fixed, "Kubernetes", (1, 30), "--kubernetes-version")
    check_version(elastic, "Kubernetes", (1, 31), "--kubernetes-version")
    with pytest.raises(UsageError, match=r"--kubernetes-version 1\.30: .* Kubernetes 1\.31 .*successPolicy"):
        check_version(elastic, "Kubernetes", (1, 30), "--kubernetes-version")
    with pytest.raises(UsageError, match=r"needs Kubeflow Trainer 2\.0"):
        train_job(kubernetes(trainer=(1, 9)))
    assert [need.version for need in trainer_needs(kubernetes(trainer=(2, 9)))] == [(2, 3)]
    assert pytorch_needs(kubernetes()) == []
    assert [need.version for need in pytorch_needs(kubernetes(least=2))] == [(1, 4)]


@pytest.mark.parametrize("text", ["1.31", "v1.31.4", "1.31+", "1.31-eks-1"])
def test_a_version_is_read_in_every_form_that_servers_write(text):
    assert parse_version("--kubernetes-version", text) == (1, 31)
    with pytest.raises(UsageError, match="such as"):
        parse_version("--kubernetes-version", "latest")


def test_manifests_have_no_anchors_and_begin_with_their_needs():
    text = to_yaml([pytorch_job(kubernetes(least=2))], pytorch_needs(kubernetes(least=2)))
    assert text.startswith("# Needs Kubeflow training operator 1.4 or newer (PyTorchJob.spec.elasticPolicy).\n")
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
def test_a_task_asks_for_the_cpus_of_its_processes(gpus, arguments, environment, cpus):
    assert task_cpus(8, gpus, arguments, environment) == cpus


def test_an_lsf_host_has_the_slots_of_its_processes():
    script = lsf_script(LsfJob(arguments=COMMAND, name="big", nodes=2, nproc=8, gpus=8, slots=32))
    assert {"#BSUB -n 64", '#BSUB -R "span[ptile=32]"'} <= set(script.splitlines())


def test_manifests_are_yaml_of_several_documents():
    import yaml

    made = [*indexed_job(kubernetes()), data_job(kubernetes(name="prep"))]
    assert list(yaml.safe_load_all(to_yaml(made))) == made


@pytest.mark.parametrize("bad", ["fsx", "fsx:data", "Fsx:/x", ":/x"])
def test_a_wrong_claim_is_told(bad):
    with pytest.raises(UsageError, match="NAME:/PATH"):
        parse_claim(bad)


def test_a_wrong_name_or_export_is_told():
    with pytest.raises(UsageError, match="--job-name must be small letters"):
        kubernetes(name="Big Job")
    assert parse_exports(["A=b=c"]) == {"A": "b=c"}
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_exports(["A B=c"])
