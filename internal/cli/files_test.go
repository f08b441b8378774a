package cli

import (
	"bytes"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestCommandsWithPipes: no command waits for a pipe that it is given in the place of a file.
func TestCommandsWithPipes(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	must.NoError(t, syscall.Mkfifo(pipe, 0o600))
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
		code := run(args, &out, &errs)
		expect.True(t, code == exitError && strings.Contains(errs.String(), "not a regular file: its mode is prw"),
			"%s: exit status %d, %s", args, code, errs.String())
	}
}
