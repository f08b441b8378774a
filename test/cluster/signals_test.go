package clustertest

import (
	"fmt"
	"net"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// TestLogReaderDies: a node whose log nobody reads any more goes on, and stops in good order.
func TestLogReaderDies(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("needs bash")
	}
	// The reader goes after the first byte; a node writes some lines as it starts, and more as it stops.
	p := launchWith(t, []string{bash, "-c", `exec "$0" "$@" 2> >(head -c 1 >/dev/null)`}, binary(t),
		"run", "--http-port=0", "--grpc-port=0", "--gossip-port=0", "--peer-port=0", "--log-level=debug")
	p.awaitReady()
	p.signal(syscall.SIGHUP)
	p.terminate()
}

// TestSecondSignal: SIGTERM while a node stops ends it at once, and that is said.
func TestSecondSignal(t *testing.T) {
	p := startNode(t, "--grace=10m").awaitReady()
	// A request that goes on for as long as it may keeps the node from stopping.
	conn, err := net.Dial("tcp", p.http)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/check HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n", p.http)
	answer := make([]byte, 25)
	if n, err := conn.Read(answer); err != nil || !strings.HasPrefix(string(answer[:n]), "HTTP/1.1 100 ") {
		t.Fatalf("%q, %v", answer[:n], err)
	}
	p.signal(syscall.SIGTERM)
	p.eventually(stopTimeout, "the log to say that it stops", func() bool { return strings.Contains(p.stderr.String(), `msg="node stopping" grace=10m`) })
	p.signal(syscall.SIGTERM)
	if code := p.exit(stopTimeout); code != 2 {
		t.Errorf("ended with %v", p.cmd.ProcessState)
	}
	for _, want := range []string{`msg="stop aborted by another signal" signal=terminated`, "weir: terminated while stopping"} {
		if !strings.Contains(p.stderr.String(), want) {
			t.Errorf("does not say %q", want)
		}
	}
}
