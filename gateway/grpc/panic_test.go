package grpcapi

import (
	"context"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/recovered"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/testkit"
)

// mistaken is a service with mistakes: it panics when it begins a check of "begin", and when it finishes one of "finish".
type mistaken struct{ fakeService }

func (mistaken) Begin(_ context.Context, b *limiter.Batch) (open []int, err *limit.Error) {
	b.Results = make([]limit.Result, len(b.Checks))
	for i, c := range b.Checks {
		if c.Key == "begin" {
			panic(c.Key)
		}
		open = append(open, i)
	}
	return open, nil
}

func (mistaken) Finish(_ context.Context, b *limiter.Batch, open []int) {
	for _, i := range open {
		if b.Checks[i].Key == "finish" {
			panic(b.Checks[i].Key)
		}
		b.Results[i].Decision = limit.Decision{Policy: "p", Allowed: true, Granted: 1}
	}
}

// TestCheckStreamPanics: a panic in a request of a stream ends the stream, wherever it happens, and is handed to the interceptor.
func TestCheckStreamPanics(t *testing.T) {
	noLeaks(t)
	s := NewServer(ServerConfig{Service: mistaken{}})
	t.Cleanup(s.Close)
	told := make(chan any, 1)
	intercept := func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		err := handle(srv, stream)
		if p, ok := errors.AsType[*recovered.Error](err); ok {
			told <- p.Value
			return status.Error(codes.Internal, "")
		}
		return err
	}
	c := weirv1.NewLimiterClient(testkit.Dial(t, serve(t, s.Register, grpc.StreamInterceptor(intercept))))
	for _, key := range []string{"begin", "finish"} {
		stream := openStream(t, c)
		if err := stream.Send(streamed(1, key)); err != nil {
			t.Fatal(err)
		}
		_, err := stream.Recv()
		for ; err == nil; _, err = stream.Recv() {
		}
		if status.Code(err) != codes.Internal || <-told != key {
			t.Errorf("%s: %v", key, err)
		}
	}
	stream := openStream(t, c) // another one is not harmed
	out := exchange(t, stream, streamed(1, "good"))
	for out.More {
		out = nextOf(t, stream)
	}
	if err := stream.CloseSend(); err != nil {
		t.Error(err)
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("a stream without panics: %v", err)
	}
}

// TestBoundElements: what has too many elements is denied before it is decoded, in any form that protobuf allows.
func TestBoundElements(t *testing.T) {
	marshal := func(m *weirv1.CheckStreamRequest) []byte {
		data, err := m.MarshalVT()
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	for _, c := range []struct {
		name string
		data []byte
		want string // the field; empty: decoded
	}{
		{"a full request", marshal(streamed(1, slices.Repeat([]string{strings.Repeat("k", 100)}, limit.MaxBatch)...)), ""},
		{"packed", marshal(&weirv1.CheckStreamRequest{Costs: make([]int64, maxStreamed+1)}), "costs"},
		{"packed to the bound", marshal(&weirv1.CheckStreamRequest{Costs: make([]int64, maxStreamed)}), ""},
		{"not packed", []byte(strings.Repeat("\x28\x01", maxStreamed+1)), "key_lengths"},
		{"in two parts", []byte(strings.Repeat("\x28\x01", maxStreamed/2+1) + string(marshal(&weirv1.CheckStreamRequest{KeyLengths: make([]uint32, maxStreamed/2)}))), "key_lengths"},
		{"empty definitions", []byte(strings.Repeat("\x1a\x00", maxStreamed+1)), "define"},
		{"empty ids", []byte(strings.Repeat("\x4a\x00", maxStreamed+1)), "request_ids"},
		{"keys are bytes", marshal(&weirv1.CheckStreamRequest{Keys: make([]byte, 1<<20)}), ""},
		{"unknown fields", []byte(strings.Repeat("\x78\x01", maxStreamed+1)), ""},
		{"no message", []byte(strings.Repeat("\xff", 1<<20)), ""},
		{"cut off", []byte(strings.Repeat("\x1a\x00", maxStreamed) + "\x1a"), ""},
	} {
		err := boundStreamed(c.data)
		bad, _ := errors.AsType[*limit.Error](err)
		if (err == nil) != (c.want == "") || bad != nil && bad.Field != c.want {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	for n, want := range map[int]bool{limit.MaxBatch: true, limit.MaxBatch + 1: false, 1 << 20: false} {
		err := boundChecks([]byte(strings.Repeat("\x0a\x00", n)))
		if (err == nil) != want || !want && !strings.Contains(err.Error(), "has "+strconv.Itoa(n)) {
			t.Errorf("%d checks: %v", n, err)
		}
	}
}
