package main

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/weirlimit/weir/internal/file"
)

// minSecret is the length in bytes of the shortest secret: what cannot be guessed has at least 128 bits.
const minSecret = 16

// maxSecret is the size in bytes of the largest file with a secret.
const maxSecret = 64 << 10

// hashSeed is the seed of key hashes, derived from the cluster's secret (HKDF, RFC 5869), so that outsiders cannot work out
// which keys share a partition, and nothing that is shown of the seed tells about the secret. Without a secret it is 0. All
// nodes must have the same.
func hashSeed(secretFile string) (uint64, error) {
	if secretFile == "" {
		return 0, nil
	}
	secret, err := file.Read(secretFile, maxSecret)
	if err != nil {
		return 0, fmt.Errorf("--cluster-secret-file: %w", err)
	}
	if secret = bytes.TrimSpace(secret); len(secret) < minSecret {
		return 0, fmt.Errorf("--cluster-secret-file: %s holds %d bytes, at least %d are needed; make a secret with: openssl rand -base64 32", secretFile, len(secret), minSecret)
	}
	seed, err := hkdf.Key(sha256.New, secret, nil, "weir hash seed 1", 8)
	if err != nil {
		return 0, fmt.Errorf("--cluster-secret-file: %w", err)
	}
	return binary.LittleEndian.Uint64(seed), nil
}
