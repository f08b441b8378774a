package clustertest

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/weirlimit/weir/auth"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const (
	strangers       = 5000
	strangersMemory = 64 << 20         // all that they may take
	strangersDelay  = 10 * time.Second // all that they may delay others
)

// headers are the frames that begin HTTP/2 and a call of a method, without a message.
func headers(t *testing.T, method string, calls int) []byte {
	var out strings.Builder
	out.WriteString(http2.ClientPreface)
	framer := http2.NewFramer(&out, nil)
	must.NoError(t, framer.WriteSettings())
	var block strings.Builder
	encoder := hpack.NewEncoder(&block)
	for i := range calls {
		block.Reset()
		for _, f := range [][2]string{
			{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "weir"}, {"content-type", "application/grpc"}, {"te", "trailers"},
			{"grpc-timeout", "99999999H"}, {"x", strings.Repeat("x", 1000)},
		} {
			must.NoError(t, encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
		}
		must.NoError(t, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1),
			BlockFragment: []byte(block.String()), EndHeaders: true}))
	}
	return []byte(out.String())
}

// residentMemory is how much memory of the process is in use, and the most that ever was.
func (p *process) residentMemory() (now, most int64) {
	p.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.t.Skip("how much memory a process uses is known on Linux only: ", err)
	}
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); len(f) == 3 && (f[0] == "VmRSS:" || f[0] == "VmHWM:") {
			kib := must.Value(strconv.ParseInt(f[1], 10, 64))(p.t)
			if f[0] == "VmRSS:" {
				now = kib << 10
			} else {
				most = kib << 10
			}
		}
	}
	return now, most
}

// TestManyStrangers: 5,000 connections of somebody who never says who it is take at most 64 MiB of a node, and shut out nobody for 10 s:
// neither who calls from elsewhere, nor who calls from the same address, nor those who ask for the node's health.
func TestManyStrangers(t *testing.T) {
	needsQuiet(t)
	if raceEnabled {
		t.Skip("the race detector takes some times the memory")
	}
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil || files.Cur < strangers+1000 {
		t.Skipf("needs %d open files, has %d (ulimit -n): %v", strangers+1000, files.Cur, err)
	}
	token := auth.NewToken()
	access := writeFile(t, "access.yaml", fmt.Sprintf("callers:\n  - {name: shop, tokens: [%s], roles: [check], policies: [\"*\"]}\n", auth.Hash(token)))
	policies := writeFile(t, "policies.yaml", "policies:\n  - {name: login, algorithm: sliding_log, limit: 1000000, window: 1h}\n")
	for _, c := range []struct {
		name, port string
		says       []byte
	}{
		{"connections without a word over gRPC", "grpc", nil},
		{"connections without a word over HTTP", "http", nil},
		{"half a request", "http", []byte("POST /v1/check HTTP/1.1\r\nHost: weir\r\n")},
		{"a body that does not come", "http", []byte("POST /v1/check HTTP/1.1\r\nHost: weir\r\nContent-Length: 1000\r\n\r\n")},
		{"half a preface", "grpc", []byte(http2.ClientPreface[:10])},
		{"no calls", "grpc", headers(t, "", 0)},
		{"calls that are denied", "grpc", headers(t, weirv1.Limiter_CheckStream_FullMethodName, 100)},
		{"health checks without a message", "grpc", headers(t, "/grpc.health.v1.Health/Check", 100)},
		{"half a command", "resp", []byte("*2\r\n$4\r\nECHO\r\n$16000\r\n" + strings.Repeat("x", 15_000))},
		{"tokens that are nobody's", "resp", []byte(strings.Repeat("AUTH x\r\n", 2000))},
		{"answers that nobody reads", "resp", []byte(strings.Repeat("PING "+strings.Repeat("x", 1000)+"\r\n", 100))},
		{"health checks that go on", "grpc", append(headers(t, "/grpc.health.v1.Health/Watch", 1), "\x00\x00\x05\x00\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00"...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := startNode(t, "--policies", policies, "--access-file", access, "--resp-port=0").awaitReady()
			address := map[string]string{"http": p.http, "grpc": p.grpc, "resp": p.resp}[c.port]
			caller := func(from string) (check, health func(context.Context) error) {
				dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
				dial := func(ctx context.Context, to string) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", to) }
				call := func(f func(ctx context.Context, conn *grpc.ClientConn) error) func(context.Context) error {
					return func(ctx context.Context) error {
						conn, err := grpc.NewClient("passthrough:///"+p.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dial))
						if err != nil {
							return err
						}
						defer conn.Close()
						return f(ctx, conn)
					}
				}
				if c.port == "resp" {
					return func(ctx context.Context) error { return respCheck(ctx, dial, p.resp, token) }, func(ctx context.Context) error {
						return kubeletProbe(ctx, dial, p.http)
					}
				}
				return call(func(ctx context.Context, conn *grpc.ClientConn) error {
					_, err := weirv1.NewLimiterClient(conn).Check(metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token),
						&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: "k"}}}}, grpc.WaitForReady(true))
					return err
				}), func(ctx context.Context) error { return kubeletProbe(ctx, dial, p.http) }
			}
			ask := func(when string) {
				t.Helper()
				for _, from := range []string{"127.0.0.2", "127.0.0.1"} { // who asks from elsewhere, and who asks as they do
					check, health := caller(from)
					for what, do := range map[string]func(context.Context) error{"a check": check, "a probe": health} {
						ctx, cancel := context.WithTimeout(t.Context(), strangersDelay)
						expect.NoError(t, do(ctx), "%s, %s from %s", when, what, from)
						cancel()
					}
				}
			}
			ask("before")
			before, _ := p.residentMemory()
			conns := make([]net.Conn, strangers)
			var dialing sync.WaitGroup
			for begin := range 50 {
				dialing.Go(func() {
					for i := begin; i < strangers; i += 50 {
						conn, err := net.Dial("tcp", address)
						if err != nil {
							t.Error(err)
							return
						}
						conns[i] = conn
						_, _ = conn.Write(c.says) // it may have been closed
					}
				})
			}
			dialing.Wait()
			defer func() {
				for _, conn := range conns {
					if conn != nil {
						_ = conn.Close()
					}
				}
			}()
			ask("with strangers")
			if _, most := p.residentMemory(); most-before > strangersMemory {
				t.Errorf("%d MiB before, and up to %d MiB with %d connections", before>>20, most>>20, strangers)
			} else {
				t.Logf("%d MiB before, and up to %d MiB with %d connections", before>>20, most>>20, strangers)
			}
		})
	}
}

// respCheck authenticates a caller of the Redis protocol, and asks once. It comes again when it is turned away, as clients do.
func respCheck(ctx context.Context, dial func(context.Context, string) (net.Conn, error), address, token string) error {
	ask := func() error {
		conn, err := dial(ctx, address)
		if err != nil {
			return err
		}
		defer conn.Close()
		deadline, _ := ctx.Deadline()
		if err := conn.SetDeadline(deadline); err != nil {
			return err
		}
		if _, err := io.WriteString(conn, "AUTH "+token+"\r\nWEIR.CHECK login k\r\nQUIT\r\n"); err != nil {
			return err
		}
		out, err := io.ReadAll(conn)
		if err == nil && !(strings.HasPrefix(string(out), "+OK\r\n*") && strings.Contains(string(out), "\r\n$7\r\nallowed\r\n:1\r\n")) {
			err = fmt.Errorf("answered %q", out)
		}
		return err
	}
	for {
		err := ask()
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
}

// kubeletProbe asks for /healthz as the kubelet does: on a connection of its own.
func kubeletProbe(ctx context.Context, dial func(context.Context, string) (net.Conn, error), address string) error {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, to string) (net.Conn, error) { return dial(ctx, to) }}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/healthz", nil)
	if err != nil {
		return err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}
