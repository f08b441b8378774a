#!/bin/sh
# Makes in a new directory what the Secrets of overlays/production hold, a directory for each:
#
#     secrets.sh DIRECTORY [NAMESPACE]
#
# Certificates are good for a year, their authorities for ten. Where cert-manager or another authority makes certificates,
# take theirs; the names to ask for are below. Keep DIRECTORY/authorities and DIRECTORY/tokens elsewhere.
set -eu
umask 077
directory=${1:?where to}
namespace=${2:-weir}
mkdir "$directory"
cd "$directory"
mkdir authorities tokens weir-access weir-callers-tls weir-nodes-tls weir-cluster weir-metrics

quietly() { # openssl draws while it makes keys
  "$@" 2>openssl.log || { cat openssl.log >&2; exit 1; }
  rm openssl.log
}

authority() { # authority NAME
  quietly openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=weir $1" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign \
    -keyout "authorities/$1.key" -out "authorities/$1.crt"
}

certificate() { # certificate AUTHORITY SECRET USAGE NAMES
  quietly openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj "/CN=weir" \
    -CA "authorities/$1.crt" -CAkey "authorities/$1.key" \
    -addext basicConstraints=critical,CA:FALSE -addext keyUsage=critical,digitalSignature \
    -addext "extendedKeyUsage=$3" -addext "subjectAltName=$4" \
    -keyout "$2/tls.key" -out "$2/tls.crt"
  cp "authorities/$1.crt" "$2/ca.crt"
}

token() { # token FILE: makes one, and says its hash
  printf 'weir_%s' "$(openssl rand -hex 32)" >"$1"
  printf 'sha256:%s' "$(openssl dgst -sha256 -r "$1" | cut -d ' ' -f 1)"
}

# For callers: the names of both Services. Clients' certificates may come from the same authority.
authority callers
service="weir.$namespace.svc" headless="weir-headless.$namespace.svc"
certificate callers weir-callers-tls serverAuth \
  "DNS:weir,DNS:weir.$namespace,DNS:$service,DNS:$service.cluster.local,DNS:weir-headless,DNS:$headless,DNS:$headless.cluster.local,DNS:*.$headless.cluster.local"

# For nodes: an authority for nothing else, and one name for all of them, which is WEIR_PEER_TLS_NAME.
authority nodes
certificate nodes weir-nodes-tls serverAuth,clientAuth DNS:weir-node

openssl rand -base64 32 >weir-cluster/gossip-keys
openssl rand -base64 32 >weir-cluster/secret

# A beginning: who calls, who scrapes, who looks after it. Tokens go to those who use them, hashes into the file.
cat >weir-access/access.yaml <<EOF
callers:
  - name: caller
    tokens: ["$(token tokens/caller)"]
    roles: [check]
    policies: ["*"]
  - name: prometheus
    tokens: ["$(token weir-metrics/token)"]
    roles: [read]
  - name: operator
    tokens: ["$(token tokens/operator)"]
    roles: [check, refund, read, topology, admin]
    policies: ["*"]
    namespaces: ["*"]
EOF

echo "made; now, for each of them:"
for secret in weir-*; do
  echo "kubectl -n $namespace create secret generic $secret --from-file=$directory/$secret"
done
