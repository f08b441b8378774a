package cli

import (
	"bytes"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestCommandsWithPipes: no command waits for a pipe that it is given in the place of a file.
func TestCommandsWithPipes(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"validate", pipe},
		{"run", "--config", pipe},
		{"run", "--policies", pipe, "--http-port", "0", "--grpc-port", "0", "--gossip-port", "", "--peer-port", ""},
		{"run", "--cluster-secret-file", pipe, "--http-port", "0", "--grpc-port", "0", "--gossip-port", "", "--peer-port", ""},
		{"run", "--access-file", pipe},
		{"run", "--gossip-key-file", pipe},
		{"run", "--tls-cert-file", pipe, "--tls-key-file", pipe},
		{"dev", "--policies", pipe, "--nodes", "1"},
		{"status", "--token-file", pipe},
		{"status", "--tls-ca-file", pipe},
		{"status", "--tls-cert-file", pipe, "--tls-key-file", pipe},
		{"gossip-keys", "add", pipe},
	} {
		var out, errs bytes.Buffer
		if code := run(args, &out, &errs); code != exitError || !strings.Contains(errs.String(), "not a regular file but a pipe") {
			t.Errorf("%s: exit status %d, %s", args, code, errs.String())
		}
	}
}
