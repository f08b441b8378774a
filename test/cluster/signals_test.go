package clustertest

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestLogReaderDies: a node whose log nobody reads any more goes on, and stops in good order.
func TestLogReaderDies(t *testing.T) {
	t.Parallel()
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

// TestLogReaderStalls: a node whose log, audit log and standard output nobody reads, while their pipe stays open, goes on deciding,
// counts what it drops, and stops in good order.
func TestLogReaderStalls(t *testing.T) {
	t.Parallel()
	fifo := filepath.Join(t.TempDir(), "log")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Skip("no pipes here:", err)
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("needs bash")
	}
	pipe, err := os.OpenFile(fifo, os.O_RDWR, 0) // both ends, so that neither open waits
	must.NoError(t, err)
	defer pipe.Close()
	p := launchWith(t, []string{bash, "-c", `exec "$0" "$@" >"` + fifo + `" 2>&1`}, binary(t),
		"run", "--http-port=0", "--grpc-port=0", "--gossip-port=0", "--peer-port=0", "--log-level=debug", "--audit-log=stderr")
	var said bytes.Buffer
	for some := make([]byte, 1024); !readyLine.Match(said.Bytes()); {
		must.NoError(t, pipe.SetReadDeadline(time.Now().Add(startTimeout)))
		n, err := pipe.Read(some)
		must.NoError(t, err, "after %s", &said)
		said.Write(some[:n])
	}
	m := readyLine.FindSubmatch(said.Bytes())
	p.http = string(m[2])
	// From here on nobody reads.
	key := strings.Repeat("k", 1000)
	dropped := func(log string) bool { return p.metrics().value("weir_log_records_dropped_total", "log", log) > 0 }
	for _, one := range []struct {
		log, path, body string
		want            int
	}{
		{"audit", "/v1/refund", `{"limit":{"algorithm":"sliding_log","limit":5,"window":"1m"},"cost":1,"key":"` + key + `"}`, http.StatusOK},
		{"log", "/v1/check", `{"policy":"none","key":"` + key + `"}`, http.StatusNotFound},
	} {
		p.eventually(2*time.Minute, "lines to be dropped of the "+one.log, func() bool {
			for range 200 {
				code, _, answer, err := p.post(one.path, "application/json", []byte(one.body))
				must.True(t, err == nil && code == one.want, "%s: %d, %v, %s", one.path, code, err, answer)
			}
			return dropped(one.log)
		})
	}
	d, err := p.check(`{"limit":{"algorithm":"sliding_log","limit":5,"window":"1m"},"key":"a"}`)
	expect.True(t, err == nil && d.Allowed, "%+v, %v", d, err)
	p.terminate()
}

// TestSecondSignal: SIGTERM while a node stops ends it at once, and that is said.
func TestSecondSignal(t *testing.T) {
	t.Parallel()
	p := startNode(t, "--grace=10m").awaitReady()
	// A request that goes on for as long as it may keeps the node from stopping.
	conn := must.Value(net.Dial("tcp", p.http))(t)
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/check HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n", p.http)
	answer := make([]byte, 25)
	n, err := conn.Read(answer)
	must.True(t, err == nil && strings.HasPrefix(string(answer[:n]), "HTTP/1.1 100 "), "%q, %v", answer[:n], err)
	p.signal(syscall.SIGTERM)
	p.eventually(stopTimeout, "the log to say that it stops", func() bool { return strings.Contains(p.stderr.String(), `msg="node stopping" grace=10m`) })
	p.signal(syscall.SIGTERM)
	code := p.exit(stopTimeout)
	expect.True(t, code == 2, "ended with %v", p.cmd.ProcessState)
	for _, want := range []string{`msg="stop aborted by another signal" signal=terminated`, "weir: terminated while stopping"} {
		expect.True(t, strings.Contains(p.stderr.String(), want), "does not say %q", want)
	}
}
