package node

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"

	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/ring"
)

// minSecret is the least length of a secret in bytes: 128 bits cannot be guessed.
const minSecret = 16

// maxSecret is the largest size of a file with a secret, in bytes.
const maxSecret = 64 << 10

// readSecret returns the hash key derived from the cluster's secret (HKDF, RFC 5869). Without the secret, outsiders
// cannot find out which keys share a partition. All nodes must have the same secret.
func readSecret(secretFile string) (ring.HashKey, error) {
	secret, err := reload.ReadFile(secretFile, maxSecret)
	if err != nil {
		return ring.HashKey{}, fmt.Errorf("cluster-secret-file: %w", err)
	}
	if secret = bytes.TrimSpace(secret); len(secret) < minSecret {
		return ring.HashKey{}, fmt.Errorf(
			"cluster-secret-file: %s holds %d bytes, at least %d are needed; make a secret with: openssl rand -base64 32", secretFile, len(secret), minSecret)
	}
	derived, err := hkdf.Key(sha256.New, secret, nil, "weir hash key 2", ring.HashKeySize)
	if err != nil {
		return ring.HashKey{}, fmt.Errorf("cluster-secret-file: %w", err)
	}
	return ring.ParseHashKey(derived) // cannot fail: the size is right
}
