package node

import (
	"bytes"
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestEveryMessageIsCounted is an attack on each method of each service that is registered, of callers and of nodes: a message of 4 MiB with
// millions of empty elements, in each list and map of the request at every depth. The elements are counted before they are decoded.
func TestEveryMessageIsCounted(t *testing.T) {
	n, _, all, _ := startAccess(t, func(cfg *Config) {
		cfg.Envoy.Dir = envoyDir(t, quotaFile)
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", "policies:\n- {name: tenant, algorithm: sliding_log, limit: 300, window: 1h}\n")
	})
	ctx := bearer(t, all)
	for addr, server := range map[string]*grpc.Server{n.GRPCAddr(): n.grpcServer, n.PeerAddr(): n.peerServer} {
		conn := must.Value(grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{}))))(t)
		defer conn.Close()
		attacks := 0
		for service, info := range server.GetServiceInfo() {
			d := must.Value(protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service)))(t)
			for _, m := range info.Methods {
				request := d.(protoreflect.ServiceDescriptor).Methods().ByName(protoreflect.Name(m.Name)).Input()
				for field, body := range manyElements(request, 4<<20-100) {
					attacks++
					var err error
					took := allocated(func() { err = sendBody(ctx, conn, "/"+service+"/"+m.Name, m.IsClientStream || m.IsServerStream, body) })
					expect.ErrorContains(t, err, "elements of lists and maps",
						"%s/%s with many %s", service, m.Name, field)
					if took > 40<<20 { // 4 MiB at each end, some of it in more than one buffer
						t.Errorf("%s/%s with many %s took %d MiB", service, m.Name, field, took>>20)
					}
				}
			}
		}
		expect.True(t, attacks >= 10, "only %d attacks", attacks)
	}
}

// sendBody calls a method with a message that is bytes already.
func sendBody(ctx context.Context, conn *grpc.ClientConn, method string, stream bool, body []byte) error {
	var out []byte
	if !stream {
		return conn.Invoke(ctx, method, body, &out)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	_ = s.SendMsg(body) // RecvMsg tells what went wrong
	return s.RecvMsg(&out)
}

// manyElements returns messages of about that size, by the field that they repeat: each list and map that a message can have, at every depth, in each form.
func manyElements(d protoreflect.MessageDescriptor, size int) map[string][]byte {
	all := make(map[string][]byte)
	var visit func(d protoreflect.MessageDescriptor, path string, within []protoreflect.FieldDescriptor)
	visit = func(d protoreflect.MessageDescriptor, path string, within []protoreflect.FieldDescriptor) {
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			path := path + "." + string(f.Name())
			if f.IsList() || f.IsMap() {
				all[path] = wrapped(within, bytes.Repeat(emptyElement(f), size/len(emptyElement(f))))
			}
			if f.IsPacked() {
				all[path+" packed"] = wrapped(within, inBytes(f, make([]byte, size)))
			}
			if f.Message() != nil && len(within) < 6 {
				visit(f.Message(), path, append(within[:len(within):len(within)], f))
			}
		}
	}
	visit(d, "", nil)
	return all
}

// wrapped puts a message into those around it.
func wrapped(within []protoreflect.FieldDescriptor, body []byte) []byte {
	for i := len(within) - 1; i >= 0; i-- {
		body = inBytes(within[i], body)
	}
	return body
}

func inBytes(f protoreflect.FieldDescriptor, body []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, f.Number(), protowire.BytesType), body)
}

// emptyElement is the shortest element of a list that is not packed.
func emptyElement(f protoreflect.FieldDescriptor) []byte {
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.StringKind, protoreflect.BytesKind:
		return inBytes(f, nil)
	case protoreflect.Fixed32Kind, protoreflect.Sfixed32Kind, protoreflect.FloatKind:
		return protowire.AppendFixed32(protowire.AppendTag(nil, f.Number(), protowire.Fixed32Type), 0)
	case protoreflect.Fixed64Kind, protoreflect.Sfixed64Kind, protoreflect.DoubleKind:
		return protowire.AppendFixed64(protowire.AppendTag(nil, f.Number(), protowire.Fixed64Type), 0)
	}
	return protowire.AppendVarint(protowire.AppendTag(nil, f.Number(), protowire.VarintType), 0)
}
