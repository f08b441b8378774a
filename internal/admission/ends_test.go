package admission

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestCallsEndOnce has many calls and streams end in every way there is at once, about when their first messages are due: each is answered
// with what is its own or with one status, and nothing of it goes on being counted.
func TestCallsEndOnce(t *testing.T) {
	answer := func(in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
		switch rand.N(8) {
		case 0:
			panic("a mistake")
		case 1:
			return nil, status.Error(codes.Aborted, in.Value)
		}
		return in, nil
	}
	echo := grpc.ServiceDesc{
		ServiceName: "echo.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Unary", Handler: func(_ any, ctx context.Context, read func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.StringValue)
			if err := read(in); err != nil {
				return nil, err
			}
			_ = grpc.SetTrailer(ctx, metadata.Pairs("of", in.Value)) // fails where the call has ended
			return answer(in)
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			in := new(wrapperspb.StringValue)
			if err := s.RecvMsg(in); err != nil {
				return err
			}
			s.SetTrailer(metadata.Pairs("of", in.Value))
			out, err := answer(in)
			if err != nil {
				return err
			}
			return s.SendMsg(out)
		}}},
	}
	calls := NewCalls(CallsConfig{
		FirstMessage: 3 * time.Millisecond, MaxCalls: 6, Memory: fairshare.New(12), StreamBytes: 1, MaxAnonymous: 4,
		Caller: func(ctx context.Context) (string, bool) {
			who := metadata.ValueFromIncomingContext(ctx, "who")
			return who[0], who[0] != ""
		},
	})
	server := grpc.NewServer(append(calls.Options(), grpc.WaitForHandlers(true))...)
	calls.Registrar(server).RegisterService(&echo, nil)
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := make(chan error, 1)
	go func() { served <- server.Serve(NewListener(l, ListenerConfig{MaxAnonymous: 128})) }()
	var mu sync.Mutex
	seen := make(map[codes.Code]int)
	call := func(conn *grpc.ClientConn, who, text string) codes.Code {
		ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(t.Context(), "who", who))
		defer cancel()
		if rand.N(4) == 0 {
			defer time.AfterFunc(rand.N(5*time.Millisecond), cancel).Stop()
		}
		s, err := conn.NewStream(ctx, &echo.Streams[0], "/echo.Service/"+[]string{"Unary", "Stream"}[rand.N(2)])
		if err != nil {
			return status.Code(err)
		}
		if rand.N(2) == 0 {
			<-time.After(rand.N(6 * time.Millisecond))
		}
		out := new(wrapperspb.StringValue)
		if err = s.SendMsg(wrapperspb.String(text)); err == nil {
			_ = s.CloseSend() // its error is that of RecvMsg
		}
		if err = s.RecvMsg(out); err == nil {
			expect.True(t, out.Value == text, "%q was answered %q", text, out.Value)
			err = s.RecvMsg(out)
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		of := s.Trailer().Get("of")
		expect.True(t, len(of) <= 1 && (len(of) != 1 || of[0] == text) &&
			(status.Code(err) != codes.Aborted || status.Convert(err).Message() == text), "%q ended with %v, %q", text,
			err, of)
		return status.Code(err)
	}
	var conns []*grpc.ClientConn
	for range 24 {
		conn := must.Value(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
		defer conn.Close()
		conns = append(conns, conn)
	}
	for round := 0; round < 20 && len(seen) < 6; round++ { // a busy machine may take a few until too many calls are open at once
		var callers sync.WaitGroup
		for i, conn := range conns {
			callers.Go(func() {
				for n := range 100 {
					code := call(conn, []string{"", "a", "b"}[i%3], fmt.Sprint(i, n))
					mu.Lock()
					seen[code]++
					mu.Unlock()
				}
			})
		}
		callers.Wait()
	}
	for code := range seen {
		switch code {
		case codes.OK, codes.Canceled, codes.Internal, codes.Aborted, codes.DeadlineExceeded, codes.Unavailable:
		default:
			t.Errorf("calls ended with %v", code)
		}
	}
	expect.True(t, len(seen) >= 6, "calls ended with %v: too few ways to say anything", seen)
	server.GracefulStop() // which waits for the handlers
	expect.NoError(t, <-served)
	places := int64(0)
	for _, r := range []*room{&calls.calls, &calls.streams} {
		taken, _ := r.places.InUse()
		places += taken + r.open.Load()
	}
	expect.True(t, places == 0 && calls.anonymous.all == 0, "after the last call %d places are taken, %d anonymous", places, calls.anonymous.all)
}
