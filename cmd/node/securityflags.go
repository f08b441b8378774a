package main

import (
	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/internal/node"
)

// securityFlags are the same as the command line writes them.
type securityFlags struct{ node.Security }

func (f *securityFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.TLS.Cert, "tls-cert-file", "", "certificate (PEM, with its chain) for callers over HTTP, gRPC and the Redis protocol, read again when it changes; empty: plain text")
	fs.StringVar(&f.TLS.Key, "tls-key-file", "", "private key (PEM) of --tls-cert-file")
	fs.StringVar(&f.TLS.CA, "tls-client-ca-file", "", "authorities (PEM) of callers' certificates, which are required then, or a token where --access-file is given")
	fs.StringVar(&f.PeerTLS.Cert, "peer-tls-cert-file", "", "certificate (PEM, with its chain) that this node presents to other nodes, as server and as client; empty: plain text between nodes")
	fs.StringVar(&f.PeerTLS.Key, "peer-tls-key-file", "", "private key (PEM) of --peer-tls-cert-file")
	fs.StringVar(&f.PeerTLS.CA, "peer-tls-ca-file", "", "authorities (PEM) of the other nodes' certificates")
	fs.StringVar(&f.PeerName, "peer-tls-name", "", "name (DNS or URI) that must be among the alternative names of every node's certificate")
	fs.StringVar(&f.AccessFile, "access-file", "", "who may do what (YAML): tokens and certificates of callers, their roles and policies, read again when it changes; empty: everybody everything")
	fs.StringVar(&f.GossipKeyFile, "gossip-key-file", "", "file with the keys that encrypt gossip, base64, one a line, the first for sending; read again when it changes")
	fs.BoolVar(&f.Insecure, "insecure", false, "open ports beyond loopback without what keeps strangers out: mutual TLS between nodes, gossip keys, a secret of the cluster, and a proof of who calls")
	fs.StringVar(&f.AuditLog, "audit-log", "", "file for the audit log, or stderr: refunds, resets, changes of gossip keys and denied calls, with who and from where, as lines of JSON; empty: none")
	fs.StringVar(&f.SecretFile, "cluster-secret-file", "", "file with the cluster's secret, the same on all nodes, 16 bytes or more: keys the hash of keys, so that outsiders cannot aim keys at one partition")
}

// envoyFlags are the settings of the front end for Envoy as the command line writes them.
type envoyFlags struct{ node.Envoy }

func (s *envoyFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&s.Dir, "envoy-config", "", "directory with files (*.yaml, *.yml) in the format of envoyproxy/ratelimit, read again when they change: serves Envoy's rate limit service on the gRPC port and POST /json; empty: off")
	fs.BoolVar(&s.MergeDomains, "envoy-merge-domains", false, "let several files of --envoy-config describe one domain")
	fs.BoolVar(&s.Headers, "envoy-response-headers", false, "have Envoy add RateLimit-Limit, RateLimit-Remaining and RateLimit-Reset to responses")
	fs.BoolVar(&s.Metadata, "envoy-dynamic-metadata", false, "add dynamic metadata to answers to Envoy: what was asked, and the metadata of limits that were not exceeded")
	fs.BoolVar(&s.Shadow, "envoy-shadow", false, "answer OK to every request of Envoy's, whatever its limits say")
}
