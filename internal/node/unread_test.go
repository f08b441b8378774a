package node

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/internal/admission"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// sendRequest sends a request over HTTP/2. Header fields without a value are left out.
func sendRequest(t *testing.T, f *http2.Framer, id uint32, message []byte, ends bool, fields [][2]string) error {
	t.Helper()
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, h := range fields {
		if h[1] != "" {
			must.NoError(t, encoder.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]}))
		}
	}
	err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndHeaders: true,
		EndStream: message == nil})
	if message != nil {
		err = errors.Join(err, f.WriteData(id, ends, message))
	}
	return err
}

// sendUnread sends n requests on a new connection, and lets the node send no answer.
func sendUnread(t *testing.T, conn net.Conn, n int, message []byte, fields [][2]string) {
	t.Helper()
	t.Cleanup(func() { conn.Close() })
	_, err := io.WriteString(conn, http2.ClientPreface)
	must.NoError(t, err)
	f := http2.NewFramer(conn, nil)
	must.NoError(t, errors.Join(f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize}),
		f.WriteSettingsAck()))
	for i := range n {
		if sendRequest(t, f, uint32(2*i+1), message, true, fields) != nil {
			break
		}
	}
}

// callFields are the header fields of a call over gRPC.
func callFields(method, token string) [][2]string {
	return [][2]string{
		{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "localhost"},
		{"content-type", "application/grpc"}, {"te", "trailers"}, {"authorization", token},
	}
}

// askUnread begins unary calls of one method on a new connection in plain text, and lets the node send no answer.
func askUnread(t *testing.T, at *admission.Listener, method string, m proto.Message, token string, calls int) net.Conn {
	t.Helper()
	conn := must.Value(net.Dial("tcp", addrOf(at)))(t)
	text := must.Value(proto.Marshal(m))(t)
	message := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(text))), text...)
	sendUnread(t, conn, calls, message, callFields(method, token))
	return conn
}

// TestUnreadCalls: a call over gRPC counts until its caller has read the answer, or the connection ends. A stranger who
// reads no answer has a few calls.
func TestUnreadCalls(t *testing.T) {
	n, shop, _, _ := withAccess(t, nil)
	check := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: "a"}}}}
	const calls = 100
	conn := askUnread(t, n.listeners.grpc, weirv1.Limiter_Check_FullMethodName, check, "Bearer "+shop, calls)
	testkit.Eventually(t, "the answers of all calls to wait", func() bool {
		unary, _ := n.calls.Load().InUse()
		return unary == calls && n.buffers.Used() >= calls*1024
	})
	must.NoError(t, conn.Close())
	testkit.Eventually(t, "the calls and their bytes to end with the connection", func() bool {
		unary, _ := n.calls.Load().InUse()
		return unary == 0 && n.buffers.Used() == 0
	})
	stranger := askUnread(t, n.listeners.grpc, healthv1.Health_Check_FullMethodName, &healthv1.HealthCheckRequest{}, "",
		calls)
	must.NoError(t, stranger.SetReadDeadline(time.Now().Add(time.Minute)))
	_, err := io.Copy(io.Discard, stranger)
	expect.True(t, !errors.Is(err, os.ErrDeadlineExceeded), "a stranger who reads nothing: %v", err)
	refusedAt(t, n, "grpc", "too_many_anonymous")
}

// TestUnreadBetweenNodes: what a process with the rights of a node has sent in part, and the answers that it does not
// read, count until its connection ends.
func TestUnreadBetweenNodes(t *testing.T) {
	n := startCluster(t, "a", nil)[0]
	const calls = maxPeerStreams - 1
	conn := askUnread(t, n.listeners.peer, peerv1.Peer_Inspect_FullMethodName, &peerv1.InspectRequest{}, "", calls)
	testkit.Eventually(t, "the answers of all calls to wait", func() bool { return n.peerBuffers.Used() >= calls*1024 })
	before, half := n.peerBuffers.Used(), make([]byte, 16<<10)
	binary.BigEndian.PutUint32(half[1:], 1<<20)
	must.NoError(t, sendRequest(t, http2.NewFramer(conn, nil), 2*calls+1, half, false,
		callFields(peerv1.Peer_Forward_FullMethodName, "")))
	testkit.Eventually(t, "half a message to count", func() bool { return n.peerBuffers.Used() >= before+16<<10 })
	must.NoError(t, conn.Close())
	testkit.Eventually(t, "all to end with the connection", func() bool {
		runtime.GC()
		return n.peerBuffers.Used() == 0
	})
}

// TestForgottenMessages: messages that a stream has not read when it ends count no more once the collector has freed
// them, though the connection stays open. gRPC does not return their buffers.
func TestForgottenMessages(t *testing.T) {
	n, shop, _, _ := withAccess(t, nil)
	conn := dialed(t, n)
	message := &weirv1.CheckStreamRequest{Keys: make([]byte, 20<<10), KeyLengths: make([]uint32, 1000)}
	var most int64
	for range 20 {
		ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "authorization",
			"Bearer "+shop), 100*time.Millisecond)
		stream := must.Value(weirv1.NewLimiterClient(conn).CheckStream(ctx))(t)
		for stream.Send(message) == nil {
			most = max(most, n.buffers.Used())
		}
		cancel()
	}
	expect.True(t, most > 16<<10, "no messages waited")
	left := func(atMost int64) func() bool {
		return func() bool {
			runtime.GC()
			return n.buffers.Used() <= atMost
		}
	}
	testkit.Eventually(t, "all but the last frame, which the transport keeps, to count no more", left(16<<10))
	must.NoError(t, conn.Close())
	testkit.Eventually(t, "the last frame to count no more", left(0))
}

// TestStrangersLeaveCalls is an attack: strangers on as many connections as there may be ask for their health, and read
// no answer. Callers still get their calls.
func TestStrangersLeaveCalls(t *testing.T) {
	n, shop, _, _ := withAccess(t, func(cfg *Config) { cfg.Memory = admission.Divide(128 << 20) })
	client, ctx := weirv1.NewLimiterClient(dialed(t, n)), bearer(t, shop)
	check := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: "a"}}}}
	must.Value(client.Check(ctx, check))(t)
	for range n.limits.MaxAnonymousConnections {
		askUnread(t, n.listeners.grpc, healthv1.Health_Check_FullMethodName, &healthv1.HealthCheckRequest{}, "", 12)
	}
	testkit.Eventually(t, "the answers to wait", func() bool {
		return n.buffers.Used() >= int64(n.cfg.Memory.MaxCalls)*1024
	})
	_, err := client.Check(ctx, check)
	expect.NoError(t, err, "while strangers read no answer")
}
