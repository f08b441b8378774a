package main

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"

	"github.com/weirlimit/weir/internal/file"
	"github.com/weirlimit/weir/ring"
)

// minSecret is the length in bytes of the shortest secret: what cannot be guessed has at least 128 bits.
const minSecret = 16

// maxSecret is the size in bytes of the largest file with a secret.
const maxSecret = 64 << 10

// secretKeys are what is derived from the cluster's secret (HKDF, RFC 5869): independent of each other, so that clients that are
// told the one which places keys cannot guess ids, and without which outsiders can neither do that nor work out which keys share
// a partition. All nodes must have the same.
type secretKeys struct{ placement, ids ring.HashKey }

func readSecret(secretFile string) (keys secretKeys, err error) {
	secret, err := file.Read(secretFile, maxSecret)
	if err != nil {
		return secretKeys{}, fmt.Errorf("--cluster-secret-file: %w", err)
	}
	if secret = bytes.TrimSpace(secret); len(secret) < minSecret {
		return secretKeys{}, fmt.Errorf("--cluster-secret-file: %s holds %d bytes, at least %d are needed; make a secret with: openssl rand -base64 32", secretFile, len(secret), minSecret)
	}
	for info, to := range map[string]*ring.HashKey{"weir hash key 2": &keys.placement, "weir id key 2": &keys.ids} {
		derived, err := hkdf.Key(sha256.New, secret, nil, info, ring.HashKeySize)
		if err != nil {
			return secretKeys{}, fmt.Errorf("--cluster-secret-file: %w", err)
		}
		if *to, err = ring.ParseHashKey(derived); err != nil {
			return secretKeys{}, fmt.Errorf("--cluster-secret-file: %w", err)
		}
	}
	return keys, nil
}
