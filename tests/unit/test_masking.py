"""Detection of secrets, which are rejected in a spec and masked in a log."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trainjob._support.masking import (
    MASK,
    holds_secret,
    masked,
    masked_lines,
    names_a_secret,
    public,
    source_holds_secret,
)

# Valid forms of tokens, but not real ones.
LITERALS = r"""
AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY python train.py
export AWS_SECRET_ACCESS_KEY=abc; python train.py
AKIAIOSFODNN7EXAMPLE
ASIAIOSFODNN7EXAMPLE
curl -o x "https://acc.blob.core.windows.net/c/x?sv=2022-11-02&sig=abcdefghij%2Bklmnopqrstuvwxyz0123456789%3D"
aws s3 cp 'https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=0123456789abcdef0123456789abcdef' .
wget "https://storage.googleapis.com/b/k?X-Goog-Signature=0123456789abcdef0123456789abcdef"
mysql --password=hunter2 -e 'select 1'
mysql --password hunter2 -e 'select 1'
PGPASSWORD=hunter2 psql
psql "host=x user=me password=hunter2"
curl -H "Authorization: Bearer abcdefgh12345"
curl -H 'PRIVATE-TOKEN: abcdefgh12345' x
curl -H "X-Api-Key: abcdefgh12345" x
curl -u me:hunter2 https://x
git clone https://oauth2:hunter2@gitlab.com/x
redis://:hunter2@host:6379/0
python -c 'import os; os.environ["HF_TOKEN"]="abcdef123"'
echo '{"password": "hunter2"}' > x
echo "{\"password\": \"hunter2\"}" > x
wandb login 0123456789abcdef0123456789abcdef01234567
env WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567 python t.py
DefaultEndpointsProtocol=https;AccountName=x;AccountKey=abcd1234==;EndpointSuffix=core.windows.net
mount -t cifs -o username=me,password=hunter2 //x /y
sshpass -p hunter2 ssh x
docker login -u me -p hunter2 registry
--db-password=hunter2
dbPassword=hunter2
glpat-abcdefghijklmnop1234
xoxb-1234567890-abcdefghij
aws configure set aws_secret_access_key wJalrXUtnFEMIabc
https://ghp_abcdefghijklmnopqrstuvwxyz0123456789@github.com/x
HF_TOKEN='abc def'
TOKEN="abc"
MYSQL_PWD=hunter2 mysql
hf_a1B2a1B2a1B2a1B2a1B2
github_pat_a1B2a1B2a1B2a1B2a1B2a1
sk-proj-a1B2a1B2a1B2a1B2a1B2
-----BEGIN OPENSSH PRIVATE KEY-----
-----BEGIN PGP PRIVATE KEY BLOCK-----
curl -sS --user me:hunter2 https://host
helm registry login -u me -p hunter2 host
mc alias set store https://host ACCESSKEY hunter2hunter2
machine host login me password hunter2
{"auths": {"host": {"auth": "bWU6aHVudGVyMg=="}}}
https://a1B2a1B2a1B2a1B2a1B2@host/simple
GOOGLE_API_KEY=AIzaa1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B
DB_PASS=hunter2 python train.py
clientSecret=hunter2
""".strip().splitlines()

# Common commands without secrets.
COMMANDS = r"""
torchrun --nproc_per_node=8 --nnodes=$PET_NNODES train.py --lr 1e-4 --max-tokens=4096 --tokenizer meta-llama/Llama-3-8B
HF_TOKEN=$(cat /run/secrets/hf) python train.py
HF_TOKEN="$HF_TOKEN" python train.py
python train.py --hf-token $(HF_TOKEN) --wandb-run-id 3k2j1h0g
python train.py --token ${TOKEN}
export GOOGLE_APPLICATION_CREDENTIALS=/secrets/gcp.json
python -c 'from huggingface_hub import login; import os; login(token=os.environ["HF_TOKEN"])'
python -c "login(token=tok, add_to_git_credential=False)"
python -c "tokenizer.pad_token = tokenizer.eos_token"
python -c 'tokenizer.add_special_tokens({"pad_token": "[PAD]"})'
--pad_token=<pad>
--eos-token "</s>"
--image-token <image>
python train.py --pad-token "!" --stop-token END
s3://bucket/checkpoints/step-1000/model.safetensors
registry.example.com/team/train@sha256:9b74c9897bac770ffc029102a200c5de6a1d2f3b4c5d6e7f8091a2b3c4d5e6f7
git checkout 3f786850e387550fdab836ed7e6dc881de23001b
wandb agent team/project/3k2j1h0g
--resume-from s3://bucket/runs/2026-01-01T00:00:00Z/ckpt
mlflow run . -P alpha=0.5 -P run_id=0123456789abcdef0123456789abcdef
--mlflow-run-id=0123456789abcdef0123456789abcdef
accelerate launch --use_auth_token train.py
python -m pip install 'torch==2.9.0' --index-url https://download.pytorch.org/whl/cu128
pip install git+https://github.com/org/repo@3f786850e387550fdab836ed7e6dc881de23001b
curl -sSf https://host:8443/a@b:c
jq '.token' file.json
kubectl get secret my-secret -o json
echo "password: see the vault page"
if [ -z "$TOKEN" ]; then echo "TOKEN is not set"; fi
[ "$PASSWORD" = "" ]
test -n "$API_KEY"
while read token; do echo $token; done
for token in a b c; do echo $token; done
grep -c token file
sed -i 's/token=.*/token=/' x
python train.py --api-key-env WANDB_API_KEY --secret-name my-secret
python train.py --password-file /run/secrets/pw
cosign verify --key /keys/cosign.pub --signature=/sig/abcdefghijklmnopqrstuv.sig
aws s3 sync s3://a/b /data --region eu-central-1
az storage blob download --account-name acc --container c --auth-mode login
rclone copy remote:bucket/path /data --s3-env-auth
deepspeed --hostfile=/etc/hosts --master_port=29500 train.py
NCCL_DEBUG=INFO PYTHONUNBUFFERED=1 python -u train.py
python eval.py --prompt "what is the secret of life?" --n 10
python eval.py --prompt 'my token: a story'
python t.py --num-secret-layers 3 --secret-sharing shamir
abfss://container@account.dfs.core.windows.net/path
hf://datasets/org/name@main/train.parquet
oci://registry/model:1
ssh git@github.com
set -euo pipefail; tok=$1; shift
curl -H "Authorization: Bearer $TOKEN" https://x
curl -H "Authorization: Bearer ${HF_TOKEN}" https://x
curl -u "$USER:$PASS" https://x
psql postgres://me:$(DB_PASSWORD)@host/db
psql postgres://me:${DB_PASSWORD}@host/db
docker run -u 1000:1000 x
python -c 'print("token:", len(x))'
const token = getToken()
token=$(python -c "print(1)")
API_KEY=$KEY run
SORT_KEY=name MONKEY=x TURNKEY=y
tok --bos_token_id 1 --eos_token_id=2
per_token_loss=true cost_per_token=0.0023
DB_PASSWORD=vault:secret/data/db#password
TOKEN_BUCKET=100 PASSWORD_MIN_LENGTH=12
http://user@host/path
accelerate launch --config_file x.yaml --main_process_port 0 t.py --hub_model_id me/x --hub_token $(HF_TOKEN)
vllm serve m --api-key $(API_KEY) --served-model-name x
AWS_ACCESS_KEY_ID=$(AWS_ACCESS_KEY_ID) python train.py
aws s3 cp s3://bucket/AKIA/part-0001.parquet .
python train.py --use-token --hash-password-algo=argon2
python train.py --token_type bearer --num-tokens=1e9 --tokens-per-batch 4096
echo sha256:9b74c9897bac770ffc029102a200c5de6a1d2f3b4c5d6e7f8091a2b3c4d5e6f7
HF_TOKEN_PATH=/run/secrets/token python train.py
DB_PASSWORD=arn:aws:secretsmanager:eu-central-1:1:secret:db python train.py
""".strip().splitlines()


FILES = [
    "cat > c.yaml <<E\npassword: hunter2\nE",
    "cat > ~/.aws/credentials <<E\n[default]\naws_secret_access_key = a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2\nE",
]


@pytest.mark.parametrize("text", [*LITERALS, *FILES])
def test_a_literal_is_found_and_masked(text: str) -> None:
    assert holds_secret(text)
    shown = masked(text)
    assert MASK in shown
    assert "hunter2" not in shown
    assert "a1B2a1B2" not in shown
    assert masked(shown) == shown


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_without_a_secret_passes(text: str) -> None:
    assert not holds_secret(text)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("login with password=hunter2 failed", f"login with password={MASK} failed"),
        ("password: hunter2", f"password: {MASK}"),
        ("Password = 'hunter 2'", f"Password = '{MASK}'"),
        ('{"api_key":"abc", "epoch": 3}', f'{{"api_key":"{MASK}", "epoch": 3}}'),
        ("connecting to postgres://u:pw@h/db", f"connecting to postgres://u:{MASK}@h/db"),
        ("key AKIAIOSFODNN7EXAMPLE wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", f"key {MASK}"),
        ("GET /x?sig=a1B2a1B2a1B2a1B2%3D&se=2026 403", f"GET /x?sig={MASK}&se=2026 403"),
        ("Authorization: Bearer abcd1234", f"Authorization: Bearer {MASK}"),
        ("a='-----BEGIN PRIVATE KEY-----\\nMIIE\\n-----END PRIVATE KEY-----'", f"a='{MASK}'"),
    ],
)
def test_only_the_secret_of_a_line_is_masked(line: str, shown: str) -> None:
    assert masked(line) == shown


@pytest.mark.parametrize(
    "line",
    [
        'FATAL: password authentication failed for user "me"',
        "RuntimeError: invalid token: '<' at line 1",
        "SyntaxError: unexpected token: foo",
        "KeyError: 'token'",
        "loss per token: 0.34, next token: 50256, tokens: 512",
        "error: token expired; secret: not found",
        "env.HF_TOKEN: is a literal secret (write HF_TOKEN: {'valueFrom': {'secretKeyRef': {'name': …}}})",
        "put it into env by secretKeyRef and write $(NAME)",
        "step 12000: 3f786850e387550fdab836ed7e6dc881de23001b",
        "wandb: run 3k2j1h0g at https://wandb.ai/team/project/runs/3k2j1h0g",
    ],
)
def test_errors_in_logs_are_not_masked(line: str) -> None:
    assert masked(line) == line


def test_a_private_key_of_several_lines_is_masked() -> None:
    body = ["MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfn", "abc="]
    key = ["-----BEGIN RSA PRIVATE KEY-----", *body, "-----END RSA PRIVATE KEY-----"]
    assert masked_lines(["a", *key, "b"]) == ["a", MASK, MASK, MASK, "-----END RSA PRIVATE KEY-----", "b"]
    assert masked_lines([*key[1:], "b"]) == [MASK, MASK, "-----END RSA PRIVATE KEY-----", "b"]
    assert masked_lines([*key[:2], "Traceback (most recent call last):", "x" * 30]) == [
        MASK,
        MASK,
        "Traceback (most recent call last):",
        "x" * 30,
    ]


@pytest.mark.parametrize(
    "source",
    [
        'token = "abc123"',
        'login(token="abc123")',
        'os.environ["HF_TOKEN"] = "abc"',
        'os.environ.setdefault("HF_TOKEN", "abc123")',
        'config = {"password": "hunter2"}',
        'def train(api_key="abc123"): pass',
        'def train(*, api_key: str = "abc123"): pass',
        'self.password: str = "hunter2"',
        'os.system("mysql --password=hunter2")',
        'x = "hf_a1B2a1B2a1B2a1B2a1B2"',
        'no python password="hunter2"',
    ],
)
def test_a_literal_in_code_is_found(source: str) -> None:
    assert source_holds_secret(source)


def test_code_without_a_secret_passes() -> None:
    assert not source_holds_secret(
        """
def train(token: str, api_key: str = "", *, password=None):
    login(token=token, add_to_git_credential=False)
    password = os.environ["PASSWORD"]
    secret = config["secret"]
    tokenizer.pad_token = "<pad>"
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "bos_token": "begin"})
    batch = {"token": token, "Authorization": f"Bearer {token}"}
    TOKEN = "token"
    path = "s3://bucket/token/password"
"""
    )


SECRETS = ["accessToken", "PGPASSWORD", "MYSQL_PWD", "HF_TOKEN_2", "db.password", "AccountKey"]
SECRETS += ["db_password", "WANDB_API_KEY"]
OTHERS = {"GOOGLE_APPLICATION_CREDENTIALS": "/secrets/key.json", "PAD_TOKEN": "!", "PWD": "/work", "USE_TOKEN": "x"}
OTHERS |= {"PASSWORD_FILE": "/y", "SORT_KEY": "name", "MONKEY": "x", "TURNKEY": "y"}


def test_names_of_secrets_are_recognized() -> None:
    assert [name for name in SECRETS if not names_a_secret(name, "x")] == []
    assert [name for name, value in OTHERS.items() if names_a_secret(name, value)] == [], "similar names"


def test_a_control_sequence_hides_no_secret() -> None:
    assert public("pass\x1b[0mword=hunter2") == f"password={MASK}"


@given(st.text() | st.lists(st.sampled_from([*"'\"=: -$({", "token", "password", "://", "-----BEGIN"])).map("".join))
def test_any_text_can_be_masked_twice(text: str) -> None:
    shown = masked(text)
    assert masked(shown) == masked(masked(shown))
    holds_secret(text)
    source_holds_secret(text)


def test_masking_takes_linear_time() -> None:
    parts = ("x=", "token ", "curl ", "docker login ", "sk-", "eyJa-", 'token="', "machine a ", "token=$", "://", '"')
    for part in parts:
        text = part * (20_000 // len(part))
        masked(text)  # quadratic time would take seconds each
        holds_secret(text)
