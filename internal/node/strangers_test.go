package node

import (
	"bytes"
	"context"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// raw is a codec of messages that are bytes already.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

func (raw) Unmarshal(data []byte, v any) error { return nil }

func (raw) Name() string { return "proto" }

// checkMethod is the name of the method that a caller without rights must not be able to have a request of read.
const checkMethod = weirv1.Limiter_Check_FullMethodName

// dialed connects to a node's gRPC port, in plain text.
func dialed(t *testing.T, n *Node, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn := must.Value(grpc.NewClient(addrOf(n.listeners.grpc), append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...))(t)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// allocated is how many bytes the process allocates while f runs.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// emptyChecks is a request of two million checks in 4 MiB, less than 5 KiB of which are left by compression.
var emptyChecks = bytes.Repeat([]byte{10, 0}, 4<<20/2-1)

// TestCompressedRequests: a stranger's requests of 4 KiB that hold 4 MiB, and two million checks, are not inflated; nor are those
// of a caller.
func TestCompressedRequests(t *testing.T) {
	n, shop, _, _ := startAccess(t, nil)
	conn := dialed(t, n, grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{}), grpc.UseCompressor(gzip.Name)))
	for _, ctx := range []context.Context{t.Context(), bearer(t, shop)} {
		took := allocated(func() {
			for range 4 {
				var out []byte
				err := conn.Invoke(ctx, checkMethod, emptyChecks, &out)
				expect.Equal(t, status.Code(err), codes.Unimplemented, "a compressed request: %v", err)
			}
		})
		expect.True(t, took <= 64<<20,
			"four compressed requests took %d MiB", took>>20) // some 8 MiB of it are the client's, who compresses
	}
}

// TestDeniedBeforeRead: who may not call a method is told so before the request is read.
func TestDeniedBeforeRead(t *testing.T) {
	n, _, _, _ := withAccess(t, func(cfg *Config) { cfg.Limits.FirstMessageTimeout = time.Hour })
	conn := dialed(t, n)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, method := range []string{checkMethod, weirv1.Limiter_CheckStream_FullMethodName, weirv1.Limiter_Status_FullMethodName} {
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
		must.NoError(t, err)
		err = s.RecvMsg(&weirv1.CheckResponse{})
		expect.Equal(t, status.Code(err), codes.Unauthenticated, "%s: %v", method, err)
	}
}

// TestFirstMessage: a call ends whose first message does not come, whatever deadline it says it has.
func TestFirstMessage(t *testing.T) {
	n, _, all, _ := withAccess(t, func(cfg *Config) { cfg.Limits.FirstMessageTimeout = 100 * time.Millisecond })
	conn := dialed(t, n)
	ctx, cancel := context.WithTimeout(bearer(t, all), time.Hour)
	defer cancel()
	for _, method := range []string{
		checkMethod, weirv1.Limiter_CheckStream_FullMethodName, "/grpc.health.v1.Health/Check",
		"/grpc.health.v1.Health/Watch", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
	} {
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
		must.NoError(t, err)
		err = s.RecvMsg(&weirv1.CheckResponse{})
		expect.Equal(t, status.Code(err), codes.DeadlineExceeded, "%s: %v", method, err)
	}
}
